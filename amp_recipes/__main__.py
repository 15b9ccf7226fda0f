"""Lets `python -m amp_recipes` do what `amp-recipes` does."""

import sys

from amp_recipes.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
