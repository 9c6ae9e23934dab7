"""`python -m detonation` is `detonation`."""

import sys

from detonation.cli import main

if __name__ == "__main__":
    sys.exit(main())
