"""The environment variables that torchrun or `launch` gives to a rank, and the failures that ranks note for them."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
STOP_SECONDS = 5  # for ranks to end after a signal of the launcher


def started_ranks() -> int | None:
    """How many ranks were started together with this process; None where it was not started as one. ValueError for what
    is no number, and for a rank beyond the last one: the others would wait for one that never comes."""
    if any(name not in os.environ for name in NUMBERS):
        return None
    for name in (*NUMBERS, "MASTER_PORT"):
        if not os.environ.get(name, "0").isdecimal():
            raise ValueError(f"{name}: must be a number, got {os.environ[name]!r}")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank >= ranks:
        raise ValueError(f"RANK: must be below WORLD_SIZE={ranks}, got {rank}")
    return ranks


def note_failure(problem: str) -> None:
    """Write the cause of this process's failure to torchrun's error file, if this process is a rank.

    Call this function before the process ends, so that ranks that fail because of it note their failure later. After
    the call, SIGTERM does not end this process: the launcher sends SIGTERM to all ranks as soon as one has ended, but
    this rank has yet to print the cause. The launcher sends SIGKILL 30 s later.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    part = Path(f"{path}.part")
    with contextlib.suppress(OSError):
        part.write_text(json.dumps({"message": problem, "timestamp": time.time()}), encoding="utf-8")
        part.replace(path)


def first_failed(failures: dict[int, "ProcessFailure"]) -> int:
    """Return the rank whose failure made the others fail. `failures` are in the order in which the launcher found them.

    A killed rank comes before ranks that failed by themselves, because those lost their connection to it. Between ranks
    that failed by themselves, the time of `note_failure` decides. Last come ranks that the launcher stopped, by SIGTERM
    or after STOP_SECONDS, and ranks that aborted: gloo and NCCL abort a process that lost a connection.
    """
    found_first = next(iter(failures))
    began = min(failure.timestamp for failure in failures.values())

    def order(rank: int) -> tuple[bool, bool, float]:
        failure = failures[rank]
        noted = failure.error_file_data.get("timestamp")
        if noted is not None:
            return False, True, noted

        late = failure.timestamp >= began + STOP_SECONDS
        stopped = rank != found_first and (late or failure.exitcode == -signal.SIGTERM)
        return stopped or failure.exitcode == -signal.SIGABRT, failure.exitcode > 0, failure.timestamp + 1

    return min(failures, key=order)
