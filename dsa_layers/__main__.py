"""`python -m dsa_layers`: the `dsa` command where no script of that name is on the path."""

import sys

from dsa_layers.command.main import main

sys.exit(main())
