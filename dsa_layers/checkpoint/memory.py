"""Memory of the devices that models are loaded to."""

from pathlib import Path

import torch

_TOTALS = Path("/proc/meminfo")
_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container


def memory_of(device: torch.device | str) -> int | None:
    """Bytes of memory that `device` has, used or not, swap included; None where the system does not tell."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type != "cpu":
        return None
    try:
        totals = dict(line.split(":", 1) for line in _TOTALS.read_text().splitlines())
        total = 1024 * sum(int(totals[name].split()[0]) for name in ("MemTotal", "SwapTotal"))
    except (OSError, ValueError, KeyError):
        return None
    try:
        return min(total, int(_LIMIT.read_text()))
    except (OSError, ValueError):  # there is none, which is written "max"
        return total
