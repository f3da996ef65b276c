"""`python -m extproc` is the command `warmpath`."""

import sys

from extproc.cli import main

sys.exit(main())
