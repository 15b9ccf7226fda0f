"""Lists known dangers of low precision, and finds them in a model."""
