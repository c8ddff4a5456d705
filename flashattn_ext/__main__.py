"""`python -m flashattn_ext`: the same as the console script `flashattn-ext`."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
