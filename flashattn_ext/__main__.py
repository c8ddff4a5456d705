"""`python -m flashattn_ext`: the same as the console script `flashattn-ext`."""

import sys

from flashattn_ext_lab.main import main

if __name__ == "__main__":
    sys.exit(main())
