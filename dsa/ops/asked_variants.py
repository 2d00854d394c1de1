"""Which compiled variants of kernels the ops ask for, found without a GPU: calls with tensors on the meta device take
the kernels' way up to the launch, and nothing is compiled."""

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from dsa import backends
from dsa.ops.declaration import Kernels, forget_calls


class Variant(NamedTuple):
    """A compile function of a module of kernels, by their names, and its arguments."""

    module: str
    function: str
    arguments: tuple[Any, ...]


@contextlib.contextmanager
def asked_variants(arch: str) -> Iterator[dict[Variant, None]]:
    """Within the block, ops of tensors on the meta device do what they do on a GPU of this arch but for the launches.
    Gives the variants that they ask for, in the order in which they do; the dict grows as they run.

    Of the whole process: nothing else may call ops meanwhile. ImportError where the DSL is not installed.
    """
    found: dict[Variant, None] = {}
    # Bridges keep the kernels of a module at hand. These modules are new ones, so that every kernel is asked for, and
    # nobody finds one of them later.
    modules: dict[str, _NotedModule] = {}

    def modules_of(kernels: Kernels, arch: str) -> "_NotedModule | tuple[_NotedModule, ...]":
        row = kernels.rows[arch]
        names = (row,) if isinstance(row, str) else row
        for name in names:
            if name not in modules:
                modules[name] = _NotedModule(importlib.import_module(name), found)
        return modules[row] if isinstance(row, str) else tuple(modules[name] for name in names)

    forget_calls()
    try:
        with (
            _replaced(Kernels, "modules", modules_of),
            _replaced(backends, "runs_kernel", lambda *_: True),
            _replaced(backends, "arch_of", lambda _: arch),
            _replaced(backends, "on_device", lambda _: contextlib.nullcontext()),
            _replaced(torch.cuda, "is_current_stream_capturing", lambda: False),
            _AsOnGpu(),
        ):
            yield found
    finally:
        forget_calls()


class _NotedModule:
    """A module of kernels whose compile functions note their arguments and give what launches nothing."""

    def __init__(self, module: ModuleType, found: dict[Variant, None]) -> None:
        self._module, self._found = module, found

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if not name.startswith("compile_"):
            return value

        def compiled(*arguments: Any) -> Any:
            self._found[Variant(self._module.__name__, name, arguments)] = None
            return lambda *_: None

        return compiled


class _AsOnGpu(TorchFunctionMode):
    """Tensors on the meta device say that they are on a GPU, and no to what only their contents could answer."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function in _ON_GPU and args[0].device.type == "meta":
            return _ON_GPU[function]
        if function is torch.mm and kwargs and "out_dtype" in kwargs and args[0].device.type == "meta":
            # There is such a product on GPUs alone.
            return args[0].new_empty(len(args[0]), args[1].shape[1], dtype=kwargs["out_dtype"])
        return function(*args, **(kwargs or {}))


_ON_GPU = {
    torch.Tensor.is_cuda.__get__: True,
    torch.Tensor.is_meta.__get__: False,
    torch.Tensor.__bool__: False,
}


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
