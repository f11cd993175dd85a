"""`python -m kvtier` is the command line."""

import sys

from kvtier.cli.main import main

sys.exit(main())
