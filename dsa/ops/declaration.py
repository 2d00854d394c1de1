"""How an op is declared: once. Its eager path, its torch.library op and its fake follow from the declaration.

    @op(
        arguments=reference.RMS_NORM,
        reference=_reference,
        results=_results,
        kernels={"sm_90": "dsa.kernels.elementwise.rms_norm_sm90"},
        limits=_check_limits,
        differentiable=True,
    )
    def _rms_norm(kernels: ModuleType, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        out = _results(x, weight, eps)
        ...  # launch

The function that is decorated launches the kernels; what calls it has checked its arguments. Without its first
parameter its signature is that of the op: tensors, numbers and strings in one flat list, which is what torch.library
takes. The public function in front of it has the op's name, its keyword arguments and its docstring.

A call of the op
- that asks for gradients, of an op that is `differentiable`, runs the reference, which is plain PyTorch;
- under torch.compile is one node of the graph, `torch.ops.dsa.NAME`, whose fake is `arguments.check` and `results`;
- else runs the kernels or the reference, as dsa.backends decides by the tensors' device and the table of kernels.

An op that has gradients of its own is declared with `autograd`: what it launches is a torch.autograd.Function, which
torch.compile looks into, and there is no torch.library op.

Checks cost more than a launch, and decoding repeats itself: a call in order is remembered by all that they look at.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from dsa import backends
from dsa.ops.known_calls import KnownCalls, signature
from dsa.reference.arguments import Arguments

OPS: dict[str, "Op"] = {}


class Op:
    """A declared op, to be called with all of its arguments in their order."""

    def __init__(
        self,
        name: str,
        launch: Callable[..., Any],
        arguments: Arguments,
        reference: Callable[..., Any],
        results: Callable[..., Any] | None,
        kernels: Mapping[str, str | tuple[str, ...]],
        limits: Callable[..., None] | None,
        differentiable: bool,
        autograd: bool,
        dtypes: tuple[torch.dtype, ...],
        public: str,
    ) -> None:
        self.name, self.launch, self.arguments, self.reference = name, launch, arguments, reference
        self.results, self.kernels, self.limits, self.differentiable = results, dict(kernels), limits, differentiable
        self.autograd, self.dtypes, self.public = autograd, dtypes, public or name
        table = backends.KERNELS.setdefault(self.public, {})
        for arch, row in self.kernels.items():
            table[arch] = _together(table.get(arch, ()), row)
        self._modules: dict[str, ModuleType | tuple[ModuleType, ...]] = {}
        self._known = KnownCalls()
        self._written = tuple(list(arguments.specs).index(argument) for argument in arguments.written)
        if not autograd:
            self._register()

    def __call__(self, *arguments: Any) -> Any:
        if self.differentiable and torch.is_grad_enabled() and wants_gradient(*arguments):
            return self.reference(*arguments)
        if torch.compiler.is_compiling() and not self.autograd and not self._lacks_dtype(_first_tensor(arguments)):
            return getattr(torch.ops.dsa, self.name)(*arguments)
        return self.run(*arguments)

    def run(self, *arguments: Any) -> Any:
        """Without a look at gradients and at torch.compile."""
        tensor = _first_tensor(arguments)
        if self._lacks_dtype(tensor):
            self.arguments.check(*arguments)
            backends.note_reference_only(f"{self.public} in {str(tensor.dtype).removeprefix('torch.')}", tensor)
            return self.reference(*arguments)
        if tensor is None or not backends.runs_kernel(self.public, tensor):
            self.arguments.check(*arguments)
            return self.reference(*arguments)
        self._check_for_kernels(arguments)
        with backends.on_device(tensor):
            return self.launch_on(tensor.device, *arguments)

    def check(self, *arguments: Any) -> None:
        """Raises what a call with these would raise before anything is launched."""
        tensor = _first_tensor(arguments)
        plain = tensor is None or torch.compiler.is_compiling() or self._lacks_dtype(tensor)
        if plain or not backends.runs_kernel(self.public, tensor):
            self.arguments.check(*arguments)
        else:
            self._check_for_kernels(arguments)

    def launch_on(self, device: torch.device, *arguments: Any) -> Any:
        """Launches the kernels for arguments that another op, which runs its own on this device, has checked."""
        return self.launch(self.modules(backends.arch_of(device)), *arguments)

    def _lacks_dtype(self, tensor: torch.Tensor | None) -> bool:
        """Whether no kernel takes the dtype of the op's first tensor."""
        return bool(self.dtypes) and tensor is not None and tensor.dtype not in self.dtypes

    def _check_for_kernels(self, arguments: tuple[Any, ...]) -> None:
        if self.autograd and torch.compiler.is_compiling():
            self._check_all(arguments)  # what was in order before means nothing to a compiled call
            return
        call = signature(*arguments)
        if self._written:
            call = (
                *call,
                torch.is_grad_enabled(),
                *(getattr(arguments[i], "requires_grad", None) for i in self._written),
            )
        if call not in self._known:
            self._check_all(arguments)
            self._known.remember(call, {})

    def _check_all(self, arguments: tuple[Any, ...]) -> None:
        self.arguments.check(*arguments)
        if self.limits is not None:
            self.limits(*arguments)
        self.arguments.check_layouts(*arguments)

    def modules(self, arch: str) -> ModuleType | tuple[ModuleType, ...]:
        """The kernels for an arch: the module that the table names, or a tuple of them."""
        if arch not in self._modules:
            if arch not in self.kernels:
                raise ValueError(
                    f"{self.public}: has no {arch} kernel for {self.name}, but for {', '.join(self.kernels)}"
                )
            row = self.kernels[arch]
            modules = tuple(map(importlib.import_module, (row,) if isinstance(row, str) else row))
            self._modules[arch] = modules[0] if isinstance(row, str) else modules
        return self._modules[arch]

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
            return self.results(*arguments)

        torch.library.register_fake(name, fake)


def op(
    *,
    arguments: Arguments,
    reference: Callable[..., Any],
    kernels: Mapping[str, str | tuple[str, ...]],
    results: Callable[..., Any] | None = None,
    limits: Callable[..., None] | None = None,
    differentiable: bool = False,
    autograd: bool = False,
    dtypes: tuple[torch.dtype, ...] = (),
    public: str = "",
) -> Callable[[Callable[..., Any]], Op]:
    """Declares the op NAME with the function `_NAME`, which launches its kernels.

    arguments       their specs
    reference       the same function in PyTorch, with the op's arguments in their order
    kernels         the op's rows in the table of kernels: arch -> module or modules, which `launch` gets first
    results         allocates what the op returns; of meta tensors too. It returns None where the op writes in place
    limits          raises ValueError for arguments in order that the kernels do not take all the same
    differentiable  where a gradient is asked for, the reference runs
    autograd        what is launched has gradients of its own; needs no `results`
    dtypes          of the first tensor, those that the kernels take, if not all of its spec's: for the others the
                    reference runs, which a warning says where the kernels would
    public          the public function that it is a part of, if that has another name: errors, warnings and the table
                    of kernels say that
    """
    if results is None and not autograd:
        raise TypeError("results: must be given for an op without autograd, got None")

    def declare(launch: Callable[..., Any]) -> Op:
        name = launch.__name__.removeprefix("_")
        OPS[name] = Op(
            *(name, launch, arguments, reference, results, kernels, limits),
            *(differentiable, autograd, dtypes, public),
        )
        return OPS[name]

    return declare


def wants_gradient(*arguments: Any) -> bool:
    """Whether one of them is, or holds, a tensor that requires a gradient."""
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in _flat(arguments))


def _first_tensor(arguments: tuple[Any, ...]) -> torch.Tensor | None:
    first = arguments[0] if arguments else None
    if isinstance(first, torch.Tensor):
        return first
    return next((x for x in _flat(arguments) if isinstance(x, torch.Tensor)), None)


def _together(first: str | tuple[str, ...], second: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """A row of the table with the modules of two ops of a public function."""
    names = *((first,) if isinstance(first, str) else first), *((second,) if isinstance(second, str) else second)
    found = tuple(dict.fromkeys(names))
    return found[0] if len(found) == 1 else found


def _flat(arguments: tuple[Any, ...]) -> list[Any]:
    found: list[Any] = []
    for x in arguments:
        found.extend(x) if isinstance(x, (list, tuple)) else found.append(x)
    return found
