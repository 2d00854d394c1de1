"""Models split over several GPUs of one machine, compared with the same parts without collectives and with one GPU.

usage: python -m dsa_bench.e2e.parallel [--gpus N] [--models MODEL...] [--runs RUN...] [--layers N] [--compile]

Starts a process per GPU, or is one of torchrun's processes. The first process prints a line of JSON per row
(`parallel_rows.rank_rows`) and at the end a table, and the time of each step to standard error. Kernels are compiled
before, in parallel; --compile does only that and needs no GPU.
"""

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import partial

import torch

from dsa_bench.e2e import one_of_many, table
from dsa_bench.e2e.clock import Clock
from dsa_bench.e2e.command import Row, compile_ahead, need_a_gpu, parser, print_rows, quiet, seconds_told
from dsa_bench.e2e.parallel_rows import add_options, asked, rank_rows
from dsa_bench.e2e.stacks import STACKS
from dsa_layers.options import positive
from dsa_layers.parallel.environment import started_ranks
from dsa_layers.parallel.launch import launch
from dsa_layers.parallel.process_group import join

COMMAND = (sys.executable, "-m", "dsa_bench.e2e.parallel")


def rows(gpus: int = 2, done: Collection[str] = ()) -> Iterator[Row]:
    """Yield the rows of all models, which other processes compute. done: shapes of an earlier run, which are left out.

    Raises RuntimeError if the processes fail, after their last row.
    """
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # other processes need the memory
    call = [*COMMAND, "--gpus", str(gpus), *(word for shape in done for word in ("--done", shape))]
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()  # the caller may stop before the last row
    if process.returncode:
        raise RuntimeError(f"{' '.join(call)} ended with {process.returncode}")


def all_rows(done: Collection[str] = ()) -> Iterator[Row]:
    """Yield the rows of two GPUs, of one of eight GPUs, and of four, as far as the machine has these GPUs."""
    count = torch.cuda.device_count()
    if count >= 2:
        yield from rows(2, done)
    yield from one_of_many.rows(done=done)
    if count >= 4:
        yield from rows(4, done)


def main(arguments: Sequence[str]) -> int:
    options = parser("parallel", __doc__, STACKS)
    options.add_argument("--gpus", type=positive, default=2, metavar="N", help="at least 2 (default: 2)")
    add_options(options)
    options.add_argument("--done", action="append", default=[], metavar="SHAPE", help="a row that is left out")
    args = options.parse_args(arguments)
    if started_ranks() is not None:
        return _rank(args)
    if args.gpus < 2:
        options.error(f"--gpus: must be at least 2, got {args.gpus}")
    if not args.compile:
        _check_gpus(options, args.gpus)
    compile_ahead(partial(asked, args.models, args.runs, args.gpus), seconds_told())
    return 0 if args.compile else launch([*COMMAND, *arguments], args.gpus)


def _check_gpus(options: argparse.ArgumentParser, gpus: int) -> None:
    need_a_gpu(options)
    if torch.cuda.device_count() < gpus:
        options.error(f"--gpus: must be at most the {torch.cuda.device_count()} that torch sees, got {gpus}")


def _rank(args: argparse.Namespace) -> int:
    ranks, device = join("cuda")
    first = ranks.rank == 0
    choice = (args.models, args.runs, args.layers, args.done, seconds_told() if first else quiet)
    found = []
    for row in rank_rows(ranks, Clock(ranks, device), *choice):
        found.append(row)
        print_rows([row] if first else [])
    if first:
        print("\n".join([table.parallel_head(), *map(table.parallel_line, found)]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
