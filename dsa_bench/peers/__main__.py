"""`python -m dsa_bench.peers`: what `probe` says."""

import sys

from dsa_bench.peers.probe import main

sys.exit(main())
