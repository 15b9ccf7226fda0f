"""Lists what is known to be dangerous in low precision, and finds it in a model."""
