"""Memory of the devices that models are loaded to."""

from pathlib import Path

import torch

# Fraction of a device's memory for weights and caches. The rest is for activations, scores, kernels, CUDA, NCCL and
# copies.
SHARE = 0.9
_TOTALS = Path("/proc/meminfo")
_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container
_IN_USE = Path("/sys/fs/cgroup/memory.current")


def memory_of(device: torch.device | str) -> int | None:
    """Bytes of memory that `device` has, used or not, swap included; None where the system does not tell."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type != "cpu":
        return None
    total = _of_meminfo("MemTotal", "SwapTotal")
    limit = _number(_LIMIT)
    return total if total is None or limit is None else min(total, limit)


def room_for_caches(device: torch.device) -> int | None:
    """Bytes that caches may take on `device` beside what is there now: all that is free, but for the share that passes
    need (`SHARE`). None where the system does not tell."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch gives it back
        return max(free + unused - int((1 - SHARE) * total), 0)
    free, limit, used = _of_meminfo("MemAvailable"), _number(_LIMIT), _number(_IN_USE)
    if free is not None and limit is not None and used is not None:
        free = min(free, limit - used)
    return None if free is None else max(int(SHARE * free), 0)


def _of_meminfo(*names: str) -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in _TOTALS.read_text().splitlines())
        return 1024 * sum(int(lines[name].split()[0]) for name in names)
    except (OSError, ValueError, KeyError):
        return None


def _number(path: Path) -> int | None:
    """None where there is no limit, which is written "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
