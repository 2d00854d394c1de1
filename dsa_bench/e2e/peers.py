"""A model's layers on the peers' kernels: while this lasts, the ops are theirs where they can be imported.

DeepGEMM gives the index scores and the FP8 linear layers, vLLM the top-k, FlashMLA the sparse attention: what engines
run DeepSeek-V3.2 with. The experts' grouped products stay ours, since a peer's need rows that are padded by kernels of
the engine's own, and so do cache writers and the rest.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

import dsa


@contextlib.contextmanager
def peer_kernels() -> Iterator[list[str]]:
    """Gives the names of the ops that are replaced; none if no peer can be imported."""
    ours = {name: getattr(dsa, name) for name in _OPS}
    replaced = {name: op for name, make in _OPS.items() if (op := make(ours[name])) is not None}
    for name, op in replaced.items():
        setattr(dsa, name, op)
    try:
        yield list(replaced)
    finally:
        for name, op in ours.items():
            setattr(dsa, name, op)


def _scores(ours: Callable[..., Any]) -> Callable[..., Any] | None:
    gemm = _deep_gemm()
    return None if gemm is None else gemm.fp8_mqa_logits


def _plan(ours: Callable[..., Any]) -> Callable[..., Any] | None:
    gemm = _deep_gemm()
    if gemm is None:
        return None
    return lambda lengths, page_size, sms: gemm.get_paged_mqa_logits_metadata(lengths[:, None], page_size, sms)


def _paged_scores(ours: Callable[..., Any]) -> Callable[..., Any] | None:
    gemm = _deep_gemm()
    if gemm is None:
        return None

    def scores(q, cache, weights, lengths, table, plan, columns):
        return gemm.fp8_paged_mqa_logits(q, cache, weights, lengths[:, None], table, plan, columns, clean_logits=False)

    return scores


def _linear(ours: Callable[..., Any]) -> Callable[..., Any] | None:
    gemm = _deep_gemm()
    if gemm is None:
        return None

    def product(a, b, out_dtype=torch.bfloat16):
        out = torch.empty(len(a[0]), len(b[0]), dtype=out_dtype, device=a[0].device)
        gemm.fp8_gemm_nt(a, b, out)
        return out

    return product


def _topk(ours: Callable[..., Any]) -> Callable[..., Any] | None:
    try:
        import peer_topk  # noqa: F401  (loads the operator library)
    except ImportError:
        return None

    def select(scores, k, *, lengths, starts=None, block_table=None, page_size=None, row_to_seq=None):
        rows, stride = len(scores), scores.stride(0)
        picks = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
        if starts is None:
            torch.ops._C.top_k_per_row_decode(scores, 1, lengths, picks, rows, stride, 1, k)
        else:
            torch.ops._C.top_k_per_row_prefill(scores, starts, starts + lengths, picks, rows, stride, 1, k)
        if block_table is None:
            return picks
        table = block_table if row_to_seq is None else block_table[row_to_seq.long()]
        pages = table.gather(1, (picks // page_size).clamp(0).long())
        return torch.where(picks < 0, picks, pages * page_size + picks % page_size)

    return select


def _prefill(ours: Callable[..., Any]) -> Callable[..., Any] | None:
    mla = _flash_mla()
    return None if mla is None else mla.flash_mla_sparse_fwd


def _decode(ours: Callable[..., Any]) -> Callable[..., Any] | None:
    mla = _flash_mla()
    if mla is None:
        return None

    def attend(q, cache, table, lengths, d_v, plan, num_splits=None, **options):
        if options.get("indices") is None:
            return ours(q, cache, table, lengths, d_v, plan, num_splits, **options)
        return mla.flash_mla_with_kvcache(q, cache, None, None, d_v, mla.get_mla_metadata()[0], None, **options)

    return attend


def _deep_gemm() -> Any:
    try:
        import deep_gemm
    except ImportError:
        return None
    return deep_gemm


def _flash_mla() -> Any:
    try:
        from vllm.third_party.flashmla import flash_mla_interface
    except ImportError:
        return None
    return flash_mla_interface


_OPS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any] | None]] = {
    "fp8_mqa_logits": _scores,
    "get_paged_mqa_logits_metadata": _plan,
    "fp8_paged_mqa_logits": _paged_scores,
    "topk_indices": _topk,
    "flash_mla_sparse_fwd": _prefill,
    "flash_mla_with_kvcache": _decode,
    "fp8_gemm_nt": _linear,
}
