"""`python -m terra_tf` is the console script `terra`."""

import sys

from terra_tf.cli import main

if __name__ == "__main__":
    sys.exit(main())
