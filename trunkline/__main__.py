"""`python -m trunkline`, and the console script `trunkline`."""

import sys

from trunkline.cli import main

if __name__ == "__main__":
    sys.exit(main())
