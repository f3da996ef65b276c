"""How large the tests of this folder are: `WARMPATH_LONG=1` makes those larger that have a larger form."""

import os

LONG = os.environ.get("WARMPATH_LONG", "") not in {"", "0"}
