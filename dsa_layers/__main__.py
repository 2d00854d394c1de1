"""Run the `dsa` command as `python -m dsa_layers`, for environments in which the `dsa` script is not on the path."""

import sys

from dsa_layers.command.main import main

sys.exit(main())
