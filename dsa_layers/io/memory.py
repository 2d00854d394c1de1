"""Query the total and free memory of a device."""

import re
from pathlib import Path

import torch

# Fraction of a device's memory for weights and caches. The remainder is for activations, scores, kernels, CUDA, NCCL
# and copies.
SHARE = 0.9
_TOTALS = Path("/proc/meminfo")
_LIMIT = Path("/sys/fs/cgroup/memory.max")  # a container's memory limit in bytes, or "max" without a limit
_IN_USE = Path("/sys/fs/cgroup/memory.current")


def memory_of(device: torch.device | str) -> int | None:
    """Return the total memory of `device` in bytes, or None if it is unknown. For the CPU this includes swap, and a
    container's limit applies."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    known = [_meminfo("MemTotal", "SwapTotal"), _number(_LIMIT)] if device.type == "cpu" else []
    return min((size for size in known if size is not None), default=None)


def room_for_caches(device: torch.device) -> int | None:
    """Return how many more bytes caches may allocate on `device`, or None if this is unknown.

    On a GPU this is the free memory minus (1 - SHARE) of the total memory, which is left for passes. On a CPU it is
    SHARE of the free memory.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # Memory that torch's caching allocator holds without using it counts as free.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(free + unused - int((1 - SHARE) * total), 0)
    limit, used = _number(_LIMIT), _number(_IN_USE)
    known = [_meminfo("MemAvailable"), None if limit is None or used is None else limit - used]
    free = min((size for size in known if size is not None), default=None)
    return None if free is None else max(int(SHARE * free), 0)


def _meminfo(*names: str) -> int | None:
    found = re.findall(rf"^(?:{'|'.join(names)}):\s+(\d+) kB$", _text(_TOTALS), re.MULTILINE)
    return 1024 * sum(map(int, found)) if found else None


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
