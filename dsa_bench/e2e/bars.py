"""What a model on two GPUs is to reach: less is to be explained."""

from collections.abc import Mapping
from typing import Any

# Of the time of silent parts over that of parts that talk, and of one GPU's time over that of both.
EFFICIENCY = {"decode 1 x 8192": 0.8, "decode 128 x 8192": 0.85, "prefill 32768": 0.8}
SPEEDUP = {"decode 1 x 8192": 1.15, "decode 128 x 8192": 1.5, "prefill 32768": 1.6}
GPUS = 2


def missed(row: Mapping[str, Any]) -> dict[str, float]:
    """{"efficiency" or "speedup": its bar} of a row's figures that are below."""
    if row["gpus"] != GPUS:
        return {}
    bars = {"efficiency": EFFICIENCY.get(row["run"]), "speedup": SPEEDUP.get(row["run"])}
    return {name: bar for name, bar in bars.items() if bar is not None and row[name] < bar}
