"""Goes back to a good checkpoint after a loss spike."""
