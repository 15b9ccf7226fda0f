"""Makes `python -m amp_recipes` the same as `amp-recipes`."""

import sys

from amp_recipes.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
