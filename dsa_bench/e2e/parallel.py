"""Models split over several GPUs of one machine, compared with the same parts without collectives and with one GPU.

`rows` starts a process per GPU, and the first of them prints the rows (`parallel_rows.rank_rows`).
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence

import torch

from dsa_bench.e2e.clock import Clock
from dsa_bench.e2e.command import Row, Tell, compiled_rows, of_models, print_rows, quiet, seconds_told
from dsa_bench.e2e.parallel_rows import asked, names, part_rows, rank_rows
from dsa_bench.e2e.stacks import STACKS
from dsa_layers.options import positive
from dsa_layers.parallel.environment import started_ranks
from dsa_layers.parallel.launch import launch
from dsa_layers.parallel.process_group import join

__all__ = ["COMMAND", "OPTIONS", "all_rows", "asked", "rows"]
MANY = 8  # GPUs whose time is computed
COMMAND = (sys.executable, "-m", "dsa_bench.e2e.parallel")
OPTIONS = of_models(STACKS) | {
    "--gpus": {"type": positive, "default": 2, "metavar": "N", "help": "default: 2"},
    "--one": {"action": "store_true", "help": "only one GPU's part, without collectives, which needs one GPU"},
    "--runs": {"nargs": "+", "choices": names(), "metavar": "RUN", "help": f"of {', '.join(names())}"},
    "--layers": {"type": positive, "metavar": "N", "help": "of split models (default: all that fit)"},
    "--done": {"action": "append", "default": [], "metavar": "SHAPE", "help": "a row that is left out"},
}


def rows(
    gpus: int = 2,
    one: bool = False,
    models: Sequence[str] = tuple(STACKS),
    runs: Collection[str] | None = None,
    layers: int | None = None,
    done: Collection[str] = (),
    tell: Tell = quiet,
) -> Iterator[Row]:
    """Return the rows of `rank_rows`, which other processes compute. Their steps go to standard error, not to `tell`.
    one: return the rows of `part_rows`.

    Raises ValueError for a number of GPUs that cannot be used, and RuntimeError if the processes fail, after their last
    row.
    """
    choice = {"models": models, "runs": runs, "layers": layers, "done": done}
    if one:
        return part_rows(gpus, **choice, tell=tell)
    count = torch.cuda.device_count()
    if not 2 <= gpus <= count:
        raise ValueError(f"--gpus: must be at least 2 and at most the {count} that torch sees, got {gpus}")
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # other processes need the memory
    return _printed([*COMMAND, json.dumps(choice | {"gpus": gpus})])


def _printed(call: Sequence[str]) -> Iterator[Row]:
    """Yield the rows that a command prints."""
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
    """Yield the rows of two GPUs, of one of MANY GPUs, and of four, as far as the machine has these GPUs."""
    count = torch.cuda.device_count()
    if count >= 2:
        yield from compiled_rows("parallel", gpus=2, done=done)
    yield from compiled_rows("parallel", gpus=MANY, one=True, done=done)
    if count >= 4:
        yield from compiled_rows("parallel", gpus=4, done=done)


def main(choice: str) -> int:
    """Start the ranks, or be one of them. choice: the options of `rows` as JSON."""
    given = json.loads(choice)
    gpus = given.pop("gpus")
    if started_ranks() is None:
        return launch([*COMMAND, choice], gpus)
    ranks, device = join("cuda")
    first = ranks.rank == 0
    for row in rank_rows(ranks, Clock(ranks, device), **given, tell=seconds_told() if first else quiet):
        print_rows([row] if first else [])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
