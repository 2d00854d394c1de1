"""Remember calls that passed the checks, and record the steps of calls that repeat.

Checks and the Python code of a launch function take longer than the launch of a kernel, and decoding repeats the same
calls. A call is identified by its signature: everything that the checks and the launch function depend on
(`signature`). An op keeps the signatures of valid calls (`KnownCalls`).

A launch function computes sizes, chooses a kernel and makes views in Python. For arguments of one signature it always
does the same. `record` runs a call under a dispatch mode and records the call's steps: allocations, other operators of
torch, and kernel launches. From these steps it makes a function of the same arguments, for instance (c0 is a dtype, c1
a kernel)

    def steps(a0, a1, a2):
        t0 = empty_cuda((128, 7168), (7168, 1), c0)
        c1(a0, a1, t0, 1e-06)
        return t0

A chain of views becomes one step that makes the last view from the tensor that owns the memory, or no step if that
tensor has the same shape and strides. Tensors that are neither arguments nor made by a step are constants, which ops
keep in caches. Steps run while the GPU of the call's first tensor is the current one. They never run while another call
is recorded, because the recording would miss their launches.
"""

import itertools
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsa.runtime.call_guards import Guard, guard
from dsa.runtime.torch_shortcuts import HAS_SHORTCUTS, empty_cpu, empty_cuda, reinterpret

_MOST = 4096  # signatures per op
_MOST_STEPS = 256  # recorded calls per op
_MOST_GUARDS = 8  # guards per shape of the first argument
_MOST_ADDED = 4  # attempts per signature to add a guard
# Recording takes half a millisecond, so only calls that come this often are recorded.
REPEATS = 8
_PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype))
Kernel = Callable[..., None]
_thread = threading.local()
_EMPTY = {
    getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
}
_SHORTCUTS = {
    "empty_strided": torch.empty_strided,
    "empty_cpu": empty_cpu,
    "empty_cuda": empty_cuda,
    "reinterpret": reinterpret,
}
# A recording cannot contain operators that read numbers from the device or the host, which may differ in the next call.
_UNSEEN = {torch.ops.aten._local_scalar_dense, torch.ops.aten.lift, torch.ops.aten.lift_fresh}


class KnownCalls:
    """The signatures of an op's valid calls, how often each came, and the steps of recorded calls.

    When there are too many signatures or steps, the oldest are forgotten. There is no lock, because a forked process
    could inherit a lock that another thread holds. Steps that another thread has forgotten stay valid.

    steps    signature -> steps
    guarded  shape of the first argument, or None if it is not a tensor -> list of (guard, steps). Most calls are found
             here
    """

    def __init__(self) -> None:
        self.steps: dict[tuple, Callable[..., Any]] = {}
        self.guarded: dict[torch.Size | None, list[tuple[Guard, Callable[..., Any]]]] = {}
        self._times: dict[tuple, int] = {}
        self._added: dict[tuple, int] = {}

    def __contains__(self, call: tuple) -> bool:
        return call in self._times

    def remember(self, call: tuple) -> None:
        while len(self._times) >= _MOST:
            for oldest in list(self._times)[:1]:
                self._times.pop(oldest, None)
        self._times[call] = 0

    def count(self, call: tuple) -> int:
        """Count a remembered call, and return how often it came."""
        self._times[call] = times = self._times.get(call, 0) + 1
        return times

    def keep(self, call: tuple, steps: Callable[..., Any]) -> None:
        if len(self.steps) >= _MOST_STEPS:
            for oldest in list(self.steps)[:1]:
                steps_of_oldest = self.steps.pop(oldest, None)
                for shape, found in list(self.guarded.items()):
                    self.guarded[shape] = [pair for pair in found if pair[1] is not steps_of_oldest]
                self._added.pop(oldest, None)
                self.recount(oldest)
        self.steps[call] = steps

    def add_guard(
        self,
        call: tuple,
        steps: Callable[..., Any],
        arguments: tuple[Any, ...],
        in_place: Sequence[tuple[int, int]],
    ) -> None:
        """Add a guard that recognises this call, unless this was tried _MOST_ADDED times for its signature."""
        if self._added.get(call, 0) >= _MOST_ADDED:
            return
        self._added[call] = self._added.get(call, 0) + 1
        like = guard(arguments, in_place)
        if like is not None:
            found = self.guarded.setdefault(first_shape(arguments), [])
            found.append((like, steps))
            del found[:-_MOST_GUARDS]

    def recount(self, call: tuple) -> None:
        self._times[call] = 0

    def forget(self) -> None:
        self._times.clear()
        self.steps.clear()
        self.guarded.clear()
        self._added.clear()


def first_shape(arguments: tuple[Any, ...]) -> torch.Size | None:
    """Return the shape of the first argument; None without a shape."""
    first = arguments[0] if arguments else None
    try:
        return first.shape if isinstance(first, torch.Tensor) else None
    except RuntimeError:  # a nested tensor
        return None


def signature(*values: object) -> tuple:
    """Return what checks and launch functions depend on. `Op` adds more for ops that write to arguments (`_signature`).

    For a tensor: shape, strides, dtype, device, address modulo 16 and lazy negation. For None, numbers, strings and
    dtypes: type and value. For lists and tuples: type and the signatures of their items. For other objects: the type.
    """
    found: list[object] = []
    for x in values:
        kind = type(x)
        if kind is torch.Tensor or isinstance(x, torch.Tensor):
            try:
                address = x.data_ptr()
                found += (x.shape, x.stride(), x.dtype, x.device, address & 15, x.is_neg())
            except RuntimeError:  # a sparse or nested tensor, which the checks refuse: equals no other call
                found.append(object())
            else:
                # A tensor that wraps others has no address; the checks for kernels refuse it.
                if not address and x.numel() and x.device.type != "meta":
                    found.append(object())
        elif kind in _PLAIN or isinstance(x, (int, float, str)):
            found += (kind, x or repr(x))  # repr tells -0.0 from 0.0
        elif isinstance(x, (list, tuple)):
            found += (kind, signature(*x))
        else:
            found.append(kind)
    return tuple(found)


def noted(kernel: Kernel) -> Kernel:
    """Return a function that launches the kernel and, while this thread records a call, adds the launch to the steps of
    the call."""

    def launch(*arguments: Any) -> None:
        kernel(*arguments)
        recording = getattr(_thread, "recording", None)
        if recording is not None:
            recording.launched(kernel, arguments)

    return launch


@dataclass(frozen=True)
class _View:
    """A view of the tensor named `of`: it begins `offset` elements after the tensor's first element, and has this shape
    and these strides."""

    of: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class _Recording(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """To disable torch.compile inside this mode, torch would import all of it, which takes seconds in a process's
        first call."""
        return False

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self.replays = True
        self.launches = 0
        self.lines: list[str] = []
        self.names: dict[str, Any] = dict(_SHORTCUTS)
        self._device = next((x.device for x in _tensors_in(arguments)), None)
        self._new = itertools.count()
        self._kept: list[Any] = []  # keeps tensors alive, so that no other tensor gets the same id
        self._of: dict[int, str | _View] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._views: dict[_View, str] = {}  # view -> the name that its step assigns
        self._empty: dict[str, str] = {}  # name -> step, for steps that allocate tensors without elements
        for i, x in enumerate(arguments):
            for name, tensor in [(f"a{i}", x)] if not isinstance(x, list | tuple) else _items(f"a{i}", x):
                self.replays &= not isinstance(tensor, list | tuple)  # lists of lists are not supported
                if isinstance(tensor, torch.Tensor):
                    self._name(tensor, name)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func.overloadpacket
        results = [x for _, x in _items("", result)] if isinstance(result, list | tuple) else [result]
        if packet in _UNSEEN or _has_any_shape(func, args) or not _all_tensors(results):
            self.replays = False
        elif packet in _EMPTY and result.layout is torch.strided:
            self._made(result)
        elif func.is_view and all(_shows(x, args[0]) for x in results):
            for x in results:
                self._viewed(x, args[0])
        else:
            if packet is torch.ops.aten.view and isinstance(args[1], torch.dtype):
                call = f"{self._tensor(args[0])}.view({self._constant(args[1])})"
            else:
                call = f"{self._constant(func)}({self._all(args, kwargs)})"
            if all(any(x is y for y in args) for x in results):  # an in-place operator: it returns only arguments
                self.lines.append(call)
            else:
                name = f"t{next(self._new)}"
                self.lines.append(f"{name} = {call}")
                for place, x in _items(name, result) if isinstance(result, list | tuple) else [(name, result)]:
                    self._name(x, place)
        return result

    def launched(self, kernel: Kernel, arguments: tuple[Any, ...]) -> None:
        self.launches += 1
        self.lines.append(f"{self._constant(kernel)}({self._all(arguments, {})})")

    def function(self, arguments: tuple[Any, ...], result: Any) -> Callable[..., Any] | None:
        """Return the function that runs the steps, if steps can repeat the call."""
        returned = self._expression(result)
        if not self.replays or not self.launches:
            return None
        # A tensor without elements can be shared by all calls, unless the call returns it. So it becomes a constant.
        names = {name: line for name, line in self._empty.items() if not re.search(rf"\b{name}\b", returned)}
        self.names |= {name: self._tensors[name] for name in names}
        parameters = ", ".join(f"a{i}" for i in range(len(arguments)))
        lines = [line for line in self.lines if line not in names.values()]
        body = "".join(f"    {line}\n" for line in [*lines, f"return {returned}"])
        exec(f"def steps({parameters}):\n{body}", self.names)
        return self.names["steps"]

    def _name(self, tensor: torch.Tensor, name: str) -> None:
        self._kept.append(tensor)
        self._of[id(tensor)], self._tensors[name] = name, tensor

    def _made(self, tensor: torch.Tensor) -> None:
        name = f"t{next(self._new)}"
        layout, dtype = f"{tuple(tensor.shape)}, {tensor.stride()}", self._constant(tensor.dtype)
        kind = tensor.device.type
        if HAS_SHORTCUTS and (kind == "cpu" or (kind == "cuda" and tensor.device == self._device)):
            self.lines.append(f"{name} = empty_{kind}({layout}, {dtype})")
        else:  # empty_strided is faster than `empty`, which accepts several kinds of arguments
            device = self._constant(tensor.device)
            self.lines.append(f"{name} = empty_strided({layout}, dtype={dtype}, device={device})")
        if not tensor.numel():
            self._empty[name] = self.lines[-1]
        self._name(tensor, name)

    def _viewed(self, view: torch.Tensor, source: torch.Tensor) -> None:
        of = self._of.get(id(source))
        if of is None:  # a view of a constant is a constant, too
            return
        base = of.of if isinstance(of, _View) else of
        offset = view.storage_offset() - self._tensors[base].storage_offset()
        self._kept.append(view)
        self._of[id(view)] = _View(base, tuple(view.shape), view.stride(), offset)

    def _all(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        named = (f"{name}={self._expression(x)}" for name, x in kwargs.items())
        return ", ".join([*map(self._expression, args), *named])

    def _expression(self, x: Any) -> str:
        if isinstance(x, torch.Tensor):
            return self._tensor(x)
        if type(x) is list:
            return f"[{', '.join(map(self._expression, x))}]"
        if type(x) is tuple:
            return f"({''.join(f'{self._expression(y)}, ' for y in x)})"
        if x is None or type(x) in (bool, int):
            return repr(x)
        if isinstance(x, tuple):  # a named tuple
            return f"{self._constant(type(x))}({', '.join(map(self._expression, x))})"
        return self._constant(x)

    def _tensor(self, x: torch.Tensor) -> str:
        of = self._of.get(id(x))
        if of is None:
            return self._constant(x)
        if isinstance(of, str):
            return of
        base = self._tensors[of.of]
        if not of.offset and of.shape == tuple(base.shape) and of.strides == base.stride():
            return of.of
        if of not in self._views:
            self._views[of] = name = f"t{next(self._new)}"
            if HAS_SHORTCUTS:
                self.lines.append(f"{name} = reinterpret({of.of}, {of.shape}, {of.strides}, {of.offset})")
            else:
                offset = f", {of.of}.storage_offset() + {of.offset}" if of.offset else ""
                self.lines.append(f"{name} = {of.of}.as_strided({of.shape}, {of.strides}{offset})")
            self._tensors[name] = x
        self._of[id(x)] = self._views[of]
        return self._views[of]

    def _constant(self, x: Any) -> str:
        name = next((name for name, other in self.names.items() if other is x), f"c{len(self.names)}")
        self.names[name] = x
        return name


def record(call: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, Callable[..., Any] | None]:
    """Return call(*arguments), and a function that runs the recorded steps for arguments of the same signature.

    The function is None for a call without kernels, and for a call within another recording. It is None, too, if steps
    cannot repeat the call, for example if it reads a number from the device.
    """
    if is_recording():
        return call(*arguments), None
    arguments = _apart(arguments, set())
    _thread.recording = recording = _Recording(arguments)
    try:
        with recording:
            result = call(*arguments)
    finally:
        _thread.recording = None
    return result, recording.function(arguments, result)


def is_recording() -> bool:
    return getattr(_thread, "recording", None) is not None


def _apart(arguments: tuple[Any, ...], seen: set[int]) -> tuple[Any, ...]:
    """Return the arguments, with a view in place of each repetition of a tensor: the next call may pass another tensor
    there."""
    found = []
    for x in arguments:
        if isinstance(x, list | tuple):
            x = type(x)(_apart(tuple(x), seen))
        elif isinstance(x, torch.Tensor):
            x = x.view_as(x) if id(x) in seen else x
            seen.add(id(x))
        found.append(x)
    return tuple(found)


def _shows(view: torch.Tensor, source: torch.Tensor) -> bool:
    """In inference mode torch marks the operators `contiguous` and `reshape` as views, even where they have copied."""
    same = view.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return same and view.dtype == source.dtype and not view.requires_grad and not source.requires_grad


def _tensors_in(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    flat = [y for x in arguments for y in (x if isinstance(x, list | tuple) else [x])]
    return [x for x in flat if isinstance(x, torch.Tensor)]


def _items(name: str, values: Any) -> list[tuple[str, Any]]:
    return [(f"{name}[{i}]", x) for i, x in enumerate(values)]


def _has_any_shape(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the shape of the result depends on the contents of the arguments, as in indexing by a mask."""
    if func.overloadpacket is torch.ops.aten.index:
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return torch.Tag.dynamic_output_shape in func.tags


def _all_tensors(values: list[Any]) -> bool:
    return all(isinstance(x, torch.Tensor) for x in values)
