"""What torchrun, or `launch`, tells a process that it starts as a rank, and what that tells them."""

import contextlib
import json
import os
import time
from pathlib import Path

NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


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
    """Writes where torch's elastic looks for it what ends this process, if that has been started as a rank: before it
    ends, so that it is there before other ranks fail because of that."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": problem, "timestamp": int(time.time())}), encoding="utf-8")
