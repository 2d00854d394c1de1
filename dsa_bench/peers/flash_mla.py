"""FlashMLA as SGLang maintains it (sgl-flash-mla, whose Hopper kernels need `use_legacy=True`) and as vLLM ships it.

Facts of both, on Hopper: dense pages have 64 keys and d 576 or 512. Sparse attention accepts 64 and 128 heads; vLLM's
prefill also accepts 8, 16 and 32. The number of indices is a multiple of 128 in prefill and of 64 in decoding. The
first call with a plan fills the plan. SGLang's prefill returns a list.

Heads are padded to a multiple of 64 outside the timing. Head counts of FEW_HEADS also run without padding.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import ModuleType

import torch

from dsa_bench.harness.calls import Call, Peers
from dsa_bench.peers.package import Library

SGL = Library("sgl-flash-mla", ("flash_mla",))
VLLM = Library("flashmla", ("vllm.third_party.flashmla.flash_mla_interface",))
BUILDS = (SGL, VLLM)  # the newest first
OPTIONS = {SGL: {"use_legacy": True}, VLLM: {}}
FEW_HEADS = (8, 16, 32)  # vLLM's prefill accepts these without padding
D_V = 512
Inputs = tuple[torch.Tensor, ...]


def sparse_prefill(inputs: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]]) -> Peers:
    """Return calls of `flash_mla_sparse_fwd` with inputs (q [tokens, heads, d], kv, indices, scale)."""
    inputs = list(inputs)
    heads = inputs[0][0].shape[1]
    peers = _both(_sparse_prefill, [_padded(i, 1) for i in inputs], heads)
    return peers | Peers.of({VLLM: partial(_sparse_prefill, VLLM)}, inputs) if heads in FEW_HEADS else peers


def dense_decode(inputs: Iterable[Inputs]) -> Peers:
    """Return calls of causal `flash_mla_with_kvcache` with inputs (q [B, s_q, heads, d], pages, block_table,
    lengths)."""
    return _both(partial(_decode, causal=True), inputs)


def sparse_decode(inputs: Iterable[Inputs]) -> Peers:
    """Return calls of `flash_mla_with_kvcache` with inputs (q [B, s_q, heads, d], FP8 pages as bytes, indices)."""
    inputs = list(inputs)
    return _both(_sparse_decode, [_padded(i, 2) for i in inputs], inputs[0][0].shape[2])


def _both(make: Callable[..., Call], inputs: Iterable[Inputs], heads: int = 64) -> Peers:
    """Return calls of both builds. heads: the number before padding; the peers' names say whether heads are padded."""
    return Peers.of(
        {library: partial(make, library) for library in BUILDS}, inputs, "{}, padded to 64" if heads % 64 else "{}"
    )


def _padded(inputs: Sequence, dim: int) -> tuple:
    q, *rest = inputs
    return torch.nn.functional.pad(q, (0, 0, 0, -q.shape[dim] % 64)), *rest


def _sparse_prefill(library: Library, module: ModuleType, q, kv, indices, scale: float) -> Call:
    return partial(module.flash_mla_sparse_fwd, q, kv, indices, scale, d_v=D_V, **OPTIONS[library])


def _decode(library: Library, module: ModuleType, q, pages, table, lengths, **options) -> Call:
    plan, _ = module.get_mla_metadata()
    options |= OPTIONS[library]
    return partial(module.flash_mla_with_kvcache, q, pages, table, lengths, D_V, plan, None, **options)


def _sparse_decode(library: Library, module: ModuleType, q, pages, indices) -> Call:
    return _decode(library, module, q, pages, None, None, is_fp8_kvcache=True, indices=indices)
