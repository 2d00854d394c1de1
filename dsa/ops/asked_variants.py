"""Which compiled variants of kernels the ops ask for, found without a GPU: calls with tensors on the meta device take
the kernels' way up to the launch, and nothing is compiled."""

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch

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
        with contextlib.ExitStack() as stack:
            for replacement in (
                (Kernels, "modules", modules_of),
                (backends, "runs_kernel", lambda *_: True),
                (backends, "arch_of", lambda _: arch),
                (backends, "on_device", lambda _: contextlib.nullcontext()),
                *_AS_ON_GPU,
            ):
                stack.enter_context(_replaced(*replacement))
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


# What tensors on the meta device answer within the block: that they are on a GPU, and no to what only their contents
# could say. Of operators, one that there is on GPUs alone.
_is_true, _mm = torch.Tensor.__bool__, torch.mm


def _product(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
    return a.new_empty(len(a), b.shape[1], dtype=options.get("out_dtype")) if _on_meta(a) else _mm(a, b, **options)


def _on_meta(x: torch.Tensor) -> bool:
    return x.device.type == "meta"


_AS_ON_GPU = (
    (torch.Tensor, "is_cuda", property(lambda x: x.device.type in ("cuda", "meta"))),
    (torch.Tensor, "is_meta", property(lambda _: False)),
    (torch.Tensor, "__bool__", lambda x: not _on_meta(x) and _is_true(x)),
    (torch, "mm", _product),
    (torch.cuda, "is_current_stream_capturing", lambda: False),
)


_INHERITED = object()


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name, _INHERITED)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
