"""Find the compiled variants of kernels that ops ask for, without a GPU: ops are called with tensors on the meta device
and run the code for a GPU up to the launch. Nothing is compiled."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from dsa.runtime import backends, variants
from dsa.runtime.op import forget_calls
from dsa.runtime.variants import Kernel, Variant


@contextlib.contextmanager
def asked_variants(arch: str) -> Iterator[dict[Variant, None]]:
    """Within the block, ops of tensors on the meta device do what they do on a GPU of this arch, but compile and launch
    nothing. Yield a dict whose keys are the variants that the ops ask for, in the order of the first request; the dict
    grows while ops run.

    The block affects the whole process, so no other thread may call ops meanwhile. An op raises ImportError if the DSL
    is not installed.
    """
    found: dict[Variant, None] = {}

    def note(variant: Variant) -> Kernel:
        found[variant] = None
        return functools.partial(launch, variant)

    forget_calls()
    try:
        with contextlib.ExitStack() as stack:
            for replacement in (
                (variants, "stand_in", note),
                (backends, "runs_kernel", lambda *_: True),
                (backends, "arch_of", lambda _: arch),
                (backends, "on_device", lambda _: contextlib.nullcontext()),
                *_AS_ON_GPU,
            ):
                stack.enter_context(_replaced(*replacement))
            yield found
    finally:
        forget_calls()


def launch(variant: Variant, *arguments: Any) -> None:
    """Do nothing in place of the variant's kernel."""


# `asked_variants` replaces some functions of torch: tensors on the meta device then claim to be on a GPU, and are False
# in conditions such as `if (x > 0).any()`. torch.mm is replaced because its out_dtype argument exists only on GPUs.
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
