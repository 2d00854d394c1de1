"""Models split over several GPUs of one machine, beside the same parts in silence and beside one GPU.

usage: python -m dsa_bench.e2e.parallel [--gpus N] [--models MODEL...] [--runs RUN...] [--layers N] [--compile]

Starts a process a GPU, or is one of those that torchrun has started. The first prints a line of JSON for each row
(`parallel_rows.rank_rows`) and at the end a table; how long each step takes goes to the standard error. Kernels are
compiled before, in parallel; --compile does that alone, also where there is no GPU.
"""

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence

import torch

from dsa.runtime import backends
from dsa_bench.e2e import one_of_many, parallel_table
from dsa_bench.e2e.clock import Clock
from dsa_bench.e2e.parallel_cases import names
from dsa_bench.e2e.parallel_kernels import prepare
from dsa_bench.e2e.parallel_rows import Row, rank_rows, seconds_told
from dsa_bench.e2e.stacks import STACKS
from dsa_layers import options
from dsa_layers.parallel.environment import started_ranks
from dsa_layers.parallel.launch import launch
from dsa_layers.parallel.process_group import join
from dsa_layers.parallel.ranks import ALONE

COMMAND = (sys.executable, "-m", "dsa_bench.e2e.parallel")


def rows(gpus: int = 2, done: Collection[str] = ()) -> Iterator[Row]:
    """The rows of all models, as processes of their own compute them. done: shapes that are left out, as an earlier run
    has them. RuntimeError where the processes fail, after the rows that there are."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # what this process keeps of a GPU, others cannot have
    call = [*COMMAND, "--gpus", str(gpus), *(word for shape in done for word in ("--done", shape))]
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()  # where nobody wants the rest; what has ended is not touched
    if process.returncode:
        raise RuntimeError(f"{' '.join(call)} ended with {process.returncode}")


def all_rows(done: Collection[str] = ()) -> Iterator[Row]:
    """The rows of two GPUs, those of one of more GPUs than there are, and of four, where there are as many."""
    there = torch.cuda.device_count()
    if there >= 2:
        yield from rows(2, done)
    yield from one_of_many.rows(Clock(ALONE, torch.device("cuda", torch.cuda.current_device())), done=done)
    if there >= 4:
        yield from rows(4, done)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m dsa_bench.e2e.parallel", description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=options.positive, default=2, metavar="N", help="at least 2 (default: 2)")
    parser.add_argument("--models", nargs="+", choices=[*STACKS], default=[*STACKS], help="default: all")
    parser.add_argument("--runs", nargs="+", choices=names(), metavar="RUN", help=f"of {', '.join(names())}")
    parser.add_argument(
        "--layers", type=options.positive, metavar="N", help="of the split models (default: as many as fit)"
    )
    parser.add_argument("--done", action="append", default=[], metavar="SHAPE", help="a row that is left out")
    parser.add_argument("--compile", action="store_true", help="compile the kernels alone, which needs no GPU")
    args = parser.parse_args(arguments)
    ranks = started_ranks()
    if ranks is not None:
        return _rank(args)
    if args.gpus < 2:
        parser.error(f"--gpus: must be at least 2, got {args.gpus}")
    if not args.compile:
        _check_gpus(parser, args.gpus)
    tell = seconds_told()
    tell("modules are imported")
    prepare(args.models, args.runs, args.gpus, tell)
    return 0 if args.compile else launch([*COMMAND, *arguments], args.gpus)


def _check_gpus(parser: argparse.ArgumentParser, gpus: int) -> None:
    if reason := backends.why_no_kernels():
        parser.error(f"a benchmark needs a GPU with kernels: {reason}")
    if torch.cuda.device_count() < gpus:
        parser.error(f"--gpus: must be at most the {torch.cuda.device_count()} that torch sees, got {gpus}")


def _rank(args: argparse.Namespace) -> int:
    ranks, device = join("cuda")
    first = ranks.rank == 0
    tell = seconds_told() if first else _nothing
    found = []
    for row in rank_rows(ranks, Clock(ranks, device), args.models, args.runs, args.layers, args.done, tell):
        found.append(row)
        if first:
            print(json.dumps(row), flush=True)
    if first:
        print("\n".join([parallel_table.head(), *map(parallel_table.line, found)]), flush=True)
    return 0


def _nothing(step: str) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
