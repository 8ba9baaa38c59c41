"""The cases of all programs for four ranks, so that one launch runs a sample of each.

Run by the fixture `samples` in `conftest.py` with the names of cases.
"""

import sys

import ranks_lifetime  # noqa: F401
import ranks_modes  # noqa: F401
import ranks_optimizers  # noqa: F401
import ranks_runtime  # noqa: F401
import ranks_shapes  # noqa: F401
import ranks_sleeping  # noqa: F401
from ranks_common import main

if __name__ == "__main__":
    main(sys.argv[1:])
