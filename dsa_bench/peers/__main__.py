"""`python -m dsa_bench.peers [OP...]`: run the peers of some ops, by default of all, and compare their results with the
references'."""

import sys

from dsa.runtime import backends
from dsa_bench.peers.probe import main

if reason := backends.why_no_kernels():
    print(f"the peers need a GPU with kernels: {reason}", file=sys.stderr)
    sys.exit(2)
sys.exit(main(sys.argv[1:]))
