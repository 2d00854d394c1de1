"""What torchrun, or `launch`, tells a process that it starts as a rank."""

import os

NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def started_ranks() -> int | None:
    """How many ranks were started together with this process; None where it was not started as one. ValueError for what
    is no number."""
    if any(name not in os.environ for name in NUMBERS):
        return None
    for name in NUMBERS:
        if not os.environ[name].isdecimal():
            raise ValueError(f"{name}: must be a number, got {os.environ[name]!r}")
    return int(os.environ["WORLD_SIZE"])
