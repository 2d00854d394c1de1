"""Judge whether an op behaves correctly with changed arguments: its error or results, and the tensors that it
writes."""

import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsa.cases.case import Case, same_bits, tensors_of
from dsa.runtime.op import Op
from tests.fuzz.changes import Change, Kind

SECONDS = {"cpu": 20, "cuda": 200}  # time limit of a call; on a GPU it can include the compilation of kernels


def judge(call: Case, arguments: dict[str, Any], changes: Mapping[str, Change], device: str) -> str | None:
    """Return a description of the op's first error, or None if the op behaves correctly."""
    before = {path: _bits(x) for path, x in _tensors(arguments)}
    plain = {name: _plain(x) for name, x in arguments.items()}
    try:
        with _time_limit(SECONDS[device]):
            with _results_as_promised():
                found = call.run(arguments)
            if device == "cuda":
                torch.cuda.synchronize()
    except (ValueError, TypeError) as error:
        message = str(error)
        if not any(re.search(rf"\b{name}\b", message) for name in changes):
            return f"its {type(error).__name__} names none of them: {message}"
        return _written(arguments, before, ())
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    kinds = {x.kind for x in changes.values()}
    return (
        _wrong_device(arguments, found)
        or _written(arguments, before, call.written)
        or (_not_the_same(call, plain, found, arguments, device) if kinds == {Kind.SAME} else None)
        or (_not_fully_written(call, plain) if Kind.OTHER not in kinds and device == "cpu" else None)
    )


def _wrong_device(arguments: dict[str, Any], found: list[torch.Tensor]) -> str | None:
    devices = {x.device for _, x in _tensors(arguments)}
    if devices and any(x.device not in devices for x in found):
        return f"returned tensors on {[x.device for x in found]}"
    return None


@contextmanager
def _results_as_promised() -> Iterator[None]:
    """Within the block, raise AssertionError if an op returns other shapes or dtypes than `Op.results` promises."""
    run = Op.run

    def checked(self: Op, *arguments: Any) -> Any:
        found = run(self, *arguments)
        got, promised = (
            [(tuple(x.shape), x.dtype) for x in tensors_of(part)]
            for part in (found, None if self.results is None else self.results(*arguments))
        )
        assert self.results is None or got == promised, f"{self.name}: returned {got}, promised {promised}"
        return found

    Op.run = checked
    try:
        yield
    finally:
        Op.run = run


def _written(arguments: dict[str, Any], before: Mapping[tuple, torch.Tensor], allowed: tuple[str, ...]) -> str | None:
    for path, x in _tensors(arguments):
        if path[0] not in allowed and x.device.type != "meta" and not torch.equal(_bits(x), before[path]):
            return f"{path[0]} was written to"
    return None


def _not_the_same(
    call: Case, plain: dict[str, Any], found: list[torch.Tensor], arguments: dict[str, Any], device: str
) -> str | None:
    """Compare with a call on contiguous tensors that do not require gradients. On a GPU, calls with tensors that
    require gradients are not compared: they can run the reference instead of a kernel."""
    if device == "cuda" and any(x.requires_grad for _, x in _tensors(arguments)):
        return None
    results = [*found, *(arguments[name] for name in call.written if arguments[name] is not None)]
    for i, (x, y) in enumerate(zip(results, call.results(plain), strict=True)):
        if not same_bits(x, y):
            return f"result {i} is not that of contiguous tensors"
    return None


def _not_fully_written(call: Case, plain: dict[str, Any]) -> str | None:
    pairs = []
    for byte in (0x55, 0xFF):
        own = {name: _plain(x) for name, x in plain.items()}
        with torch.no_grad(), _Uninitialised(byte):
            pairs.append(call.results(own))
    for i, (x, y) in enumerate(zip(*pairs, strict=True)):
        if not same_bits(x, y):
            return f"result {i} is not fully written"
    return None


class _Uninitialised(TorchDispatchMode):
    """Fill the memory of tensors that are allocated without contents (`torch.empty` and similar) with `byte`."""

    def __init__(self, byte: int) -> None:
        super().__init__()
        self.byte = byte

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function in _ALLOCATES:
            memory = torch.empty(0, dtype=torch.uint8, device=found.device)
            memory.set_(found.untyped_storage()).fill_(self.byte)
        return found


_ALLOCATES = {
    *(torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.empty_like.default),
    *(torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default),
}


def _tensors(arguments: dict[str, Any]) -> Iterator[tuple[tuple, torch.Tensor]]:
    for name, value in arguments.items():
        for place, x in enumerate(value if isinstance(value, (list, tuple)) else (value,)):
            if isinstance(x, torch.Tensor):
                yield (name, place), x


def _bits(x: torch.Tensor) -> torch.Tensor:
    if x.device.type == "meta":
        return x
    flat = x.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8)


def _plain(value: Any) -> Any:
    """Return the same numbers with default strides and without gradients. A FlashMLASchedMeta is replaced, because a
    call stores its plan there."""
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(x) for x in value)
    if hasattr(value, "have_initialized"):
        return type(value)()
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 4 and value.dtype == torch.uint8 and value.shape[-1] == 584 and value.stride(-1) == 1:
        # A V4 cache with padding between pages keeps it, because kernels need pages at multiples of 16 bytes.
        return value.detach().clone() if value.is_contiguous() else _padded_pages(value)
    return value.detach().clone(memory_format=torch.contiguous_format)


def _padded_pages(cache: torch.Tensor) -> torch.Tensor:
    pages, size = cache.shape[0], cache.shape[1] * cache.shape[3]
    memory = cache.new_zeros(pages, size + -size % 576)
    return memory[:, :size].unflatten(1, cache.shape[1:]).copy_(cache)


@contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
