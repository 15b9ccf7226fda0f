"""What a precision does to a model: instruments that watch a step, and what they find."""
