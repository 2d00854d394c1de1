"""The command that runs the ranks of `dsa_bench.e2e.parallel` on a CPU, with small models, gloo and the host's
clock."""

import sys

from dsa_bench.e2e import parallel
from dsa_layers.parallel.ranks import join
from tests.bench import parallel_ranks

COMMAND = (sys.executable, "-m", "tests.bench.parallel_command")

if __name__ == "__main__":
    parallel_ranks.make_small()
    parallel.COMMAND = COMMAND
    parallel.join = lambda device: join("cpu")
    parallel.Clock = lambda ranks, device: parallel_ranks.HostClock(ranks)
    sys.exit(parallel.main(sys.argv[1]))
