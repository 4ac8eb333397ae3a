"""Lets ``python -m sklearn_mr2`` do what the ``sklearn-mr2`` command does."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
