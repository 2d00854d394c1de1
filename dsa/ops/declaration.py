"""How an op is declared: once. Its eager path, its torch.library op and its fake follow from the declaration.

    @op(
        arguments=reference.RMS_NORM,
        reference=reference.rms_norm,
        results=_results,
        kernels={"sm_90": "dsa.kernels.elementwise.rms_norm_sm90"},
        limits=_check_limits,
        differentiable=True,
    )
    def _rms_norm(kernels: ModuleType, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        out = _results(x)
        ...  # launch

The function that is decorated launches the kernels; its caller has checked the arguments. Its first parameter is the
kernels' module, the others are the op's arguments, all of them, as the specs name and order them: tensors, numbers and
strings in one flat list, which is what PyTorch's custom ops take. The other functions of a declaration name as
parameters the arguments that they use, and get these. The public function in front of the op has its name, its keyword
arguments and its docstring.

A call of the op
- that asks for gradients, of an op that is `differentiable`, runs the reference, which is plain PyTorch;
- under torch.compile is one node of the graph, `torch.ops.dsa.NAME`, whose fake is `arguments.check` and `results`;
- else runs the kernels or the reference, as dsa.backends decides by the tensors' device and the table of kernels.

An op that has gradients of its own is declared with `autograd`: it launches a torch.autograd.Function, and of such ops
none is registered with torch. torch.compile breaks its graph there, so `fullgraph=True` does not take it.

Checks and the Python of a launch cost more than the kernel's launch, and decoding repeats itself: a call in order is
remembered by all that these look at (`known_calls`), and one that comes again and again becomes the steps that it takes
(`recording`), which one question in C++ finds (`call_guards`). So what a launch does may follow from the signature of
its arguments and from nothing else.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dsa import backends
from dsa.ops.known_calls import REPEATS, KnownCalls, first_shape, signature
from dsa.ops.recording import NotedKernels, is_recording, record
from dsa.reference.arguments import Arguments

OPS: dict[str, "Op"] = {}
Row = str | tuple[str, ...]


class Kernels:
    """Where the kernels of an op, or of a part of one, are.

    name  what errors call them
    rows  GPU arch -> the name of a module, or of several
    """

    def __init__(self, name: str, rows: Mapping[str, Row]) -> None:
        self.name, self.rows = name, dict(rows)
        self._modules: dict[str, NotedKernels | tuple[NotedKernels, ...]] = {}

    def modules(self, arch: str) -> NotedKernels | tuple[NotedKernels, ...]:
        """The kernels for an arch: what its row names, a module or a tuple of them."""
        if arch not in self._modules:
            if arch not in self.rows:
                there = ", ".join(f"{name} ({other})" for other, row in self.rows.items() for name in _names(row))
                raise ValueError(f"{self.name}: has no {arch} kernel beside {there}")
            row = self.rows[arch]
            modules = tuple(NotedKernels(importlib.import_module(name)) for name in _names(row))
            self._modules[arch] = modules[0] if isinstance(row, str) else modules
        return self._modules[arch]


def rows_of(*parts: Kernels) -> dict[str, Row]:
    """The rows of an op that launches these parts' kernels: of the archs that every part has kernels for."""
    archs = [arch for arch in parts[0].rows if all(arch in part.rows for part in parts)]
    return {arch: tuple(name for part in parts for name in _names(part.rows[arch])) for arch in archs}


class Op:
    """A declared op, to be called with all of its arguments in their order."""

    def __init__(
        self,
        name: str,
        launch: Callable[..., Any],
        arguments: Arguments,
        reference: Callable[..., Any],
        results: Callable[..., Any] | None,
        kernels: Mapping[str, Row],
        limits: Callable[..., None] | None,
        differentiable: bool,
        autograd: bool,
        dtypes: tuple[torch.dtype, ...],
        public: str,
    ) -> None:
        names, accepted = [*inspect.signature(launch).parameters], ["kernels", *arguments.specs]
        if names != accepted:
            raise TypeError(f"_{name}: must take {', '.join(accepted)}, got {', '.join(names)}")
        self.name, self.launch, self.arguments, self.public = name, launch, arguments, public or name
        self.reference = arguments.taking(f"reference of {name}", reference)
        self.results = None if results is None else arguments.taking(f"results of {name}", results)
        self.limits = None if limits is None else arguments.taking(f"limits of {name}", limits)
        self.differentiable, self.autograd, self.dtypes = differentiable, autograd, dtypes
        self.kernels = Kernels(self.public, kernels)
        table = backends.KERNELS.setdefault(self.public, {})
        for arch, row in self.kernels.rows.items():
            table[arch] = _together(table.get(arch, ()), row)
        self.known = KnownCalls()
        places = {argument: i for i, argument in enumerate(arguments.specs)}
        self._written = tuple(places[argument] for argument in arguments.written)
        # What is written may be the tensor that it is like, and limits may be others then.
        like = ((argument, arguments.specs[argument].like) for argument in arguments.written)
        self._in_place = tuple((places[argument], places[other]) for argument, other in like if other)
        if not autograd:
            self._register()

    def __call__(self, *arguments: Any) -> Any:
        if not torch.compiler.is_compiling() and self.known.guarded and backends.allows_kernels():
            for like, steps in self.known.guarded.get(first_shape(arguments), ()):
                if like(*arguments):
                    return steps(*arguments)
        if self.differentiable and torch.is_grad_enabled() and wants_gradient(*arguments):
            return self.reference(*arguments)
        if torch.compiler.is_compiling() and not self.autograd and not self._lacks_dtype(_first_tensor(arguments)):
            self.arguments.check_ints_for_floats(*arguments)
            return getattr(torch.ops.dsa, self.name)(*arguments)
        return self.run(*arguments)

    def run(self, *arguments: Any) -> Any:
        """Without a look at gradients and at torch.compile."""
        tensor, call = _first_tensor(arguments), None
        if self._lacks_dtype(tensor):
            self.arguments.check(*arguments)
            backends.note_reference_only(f"{self.public} in {str(tensor.dtype).removeprefix('torch.')}", tensor)
            return self.reference(*arguments)
        if self.known.steps and not is_recording():
            call = self._signature(arguments)
            steps = self.known.steps.get(call)
            if steps is not None and backends.allows_kernels():
                self.known.add_guard(call, steps, arguments, self._in_place)
                with backends.on_device(tensor):
                    return steps(*arguments)
        if tensor is None or not self.runs_kernel(tensor):
            self.arguments.check(*arguments)
            return self.reference(*arguments)
        call = self._signature(arguments) if call is None else call
        self._check_for_kernels(call, arguments)
        launch = functools.partial(self.launch_on, tensor.device)
        with backends.on_device(tensor):
            if self.autograd or is_recording() or self.known.count(call) != REPEATS:
                return launch(*arguments)
            try:
                result, steps = record(launch, arguments)
            except BaseException:
                self.known.recount(call)
                raise
            if steps is not None:
                self.known.keep(call, steps)
            return result

    def runs_kernel(self, tensor: torch.Tensor) -> bool:
        """Whether this op has kernels for the tensor's GPU, where its public function's other parts may have some."""
        return backends.runs_kernel(self.public, tensor, self.kernels.rows)

    def check(self, *arguments: Any) -> None:
        """Raises what a call with these would raise before anything is launched."""
        tensor = _first_tensor(arguments)
        plain = tensor is None or torch.compiler.is_compiling() or self._lacks_dtype(tensor)
        if plain or not self.runs_kernel(tensor):
            self.arguments.check(*arguments)
        else:
            self._check_for_kernels(self._signature(arguments), arguments)

    def launch_on(self, device: torch.device, *arguments: Any) -> Any:
        """Launches the kernels for arguments that another op, which runs its own on this device, has checked."""
        return self.launch(self.kernels.modules(backends.arch_of(device)), *arguments)

    def _lacks_dtype(self, tensor: torch.Tensor | None) -> bool:
        """Whether no kernel takes the dtype of the op's first tensor."""
        return bool(self.dtypes) and tensor is not None and tensor.dtype not in self.dtypes

    def _check_for_kernels(self, call: tuple, arguments: tuple[Any, ...]) -> None:
        """call: their signature."""
        if not call:
            self._check_all(arguments)
        elif call not in self.known:
            self._check_all(arguments)
            self.known.remember(call)

    def _signature(self, arguments: tuple[Any, ...]) -> tuple:
        """() for a call that is compiled: what was in order before means nothing to it."""
        if self.autograd and torch.compiler.is_compiling():
            return ()
        call = signature(*arguments)
        if not self._written:
            return call
        return (
            *call,
            torch.is_grad_enabled(),
            *(getattr(arguments[i], "requires_grad", None) for i in self._written),
            *(_begin_together(arguments[i], arguments[other]) for i, other in self._in_place),
        )

    def _check_all(self, arguments: tuple[Any, ...]) -> None:
        self.arguments.check(*arguments)
        if self.limits is not None:
            self._check_limits(arguments)
        self.arguments.check_layouts(*arguments)

    def _check_limits(self, arguments: tuple[Any, ...]) -> None:
        try:
            self.limits(*arguments)
        except ValueError as error:
            archs = " and ".join(self.kernels.rows)
            raise ValueError(f"{error} (kernels for {archs})") from None

    def _register(self) -> None:
        def prototype() -> None:
            """Has the signature of the op."""

        whole = inspect.signature(self.launch)
        prototype.__signature__ = whole.replace(parameters=list(whole.parameters.values())[1:])
        schema = torch.library.infer_schema(prototype, mutates_args=self.arguments.written)
        name, written = f"dsa::{self.name}", self.arguments.written
        torch.library.custom_op(name, self.run, mutates_args=written, schema=schema)

        def fake(*arguments: Any) -> Any:
            self.arguments.check(*arguments)
            return None if self.results is None else self.results(*arguments)

        torch.library.register_fake(name, fake)


def op(
    *,
    arguments: Arguments,
    reference: Callable[..., Any],
    kernels: Mapping[str, Row],
    results: Callable[..., Any] | None = None,
    limits: Callable[..., None] | None = None,
    differentiable: bool = False,
    autograd: bool = False,
    dtypes: tuple[torch.dtype, ...] = (),
    public: str = "",
) -> Callable[[Callable[..., Any]], Op]:
    """Declares the op NAME with the function `_NAME`, which launches its kernels.

    `reference`, `results` and `limits` get the arguments that their parameters name. TypeError where a function names
    what is no argument, and where the launch does not take all of them.

    arguments       their specs
    reference       the same function in PyTorch
    kernels         the op's rows in the table of kernels: arch -> module or modules, which the launch gets first
    results         allocates what the op returns; of meta tensors too. None for an op that writes to its arguments and
                    returns nothing, and for one with `autograd`
    limits          raises ValueError for arguments that the specs allow and the kernels do not take
    differentiable  where a gradient is asked for, the reference runs
    autograd        what is launched has gradients of its own
    dtypes          of the first tensor, those that the kernels take, if not all of its spec's: for the others the
                    reference runs, with a warning where the kernels would have run
    public          the public function that the op is a part of, if that has another name: errors, warnings and the
                    table of kernels say that name
    """
    if results is None and not autograd and not arguments.written:
        raise TypeError("results: must be given for an op that returns something, got None")

    def declare(launch: Callable[..., Any]) -> Op:
        name = launch.__name__.removeprefix("_")
        OPS[name] = Op(
            *(name, launch, arguments, reference, results, kernels, limits),
            *(differentiable, autograd, dtypes, public),
        )
        return OPS[name]

    return declare


def forget_calls() -> None:
    """What is known of calls, of all ops: for who changes what launches choose from."""
    for each in OPS.values():
        each.known.forget()


def wants_gradient(*arguments: Any) -> bool:
    """Whether one of them is, or holds, a tensor that requires a gradient."""
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in _flat(arguments))


def _begin_together(x: Any, y: Any) -> bool:
    """Whether both are tensors from the same address on."""
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    try:
        return x.data_ptr() == y.data_ptr()
    except RuntimeError:  # a sparse or nested tensor, which the checks refuse
        return False


def _first_tensor(arguments: tuple[Any, ...]) -> torch.Tensor | None:
    first = arguments[0] if arguments else None
    if isinstance(first, torch.Tensor):
        return first
    return next((x for x in _flat(arguments) if isinstance(x, torch.Tensor)), None)


def _names(row: Row) -> tuple[str, ...]:
    return (row,) if isinstance(row, str) else row


def _together(first: Row, second: Row) -> Row:
    """A row of the table with the modules of two ops of a public function."""
    found = tuple(dict.fromkeys((*_names(first), *_names(second))))
    return found[0] if len(found) == 1 else found


def _flat(arguments: tuple[Any, ...]) -> list[Any]:
    found: list[Any] = []
    for x in arguments:
        found.extend(x) if isinstance(x, (list, tuple)) else found.append(x)
    return found
