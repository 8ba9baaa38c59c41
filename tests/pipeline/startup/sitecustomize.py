"""Starts a rank in half the time: Keras imports these packages if they can be imported.

Only launched ranks find this module; see `launch.environment`.
"""

import sys

for name in ("matplotlib", "pandas", "sklearn"):
    sys.modules[name] = None
