"""vLLM's index scores of a prompt and their top-k as one op, for long contexts: no matrix of scores is written.

vLLM computes scores, and then selects from them. The first call here keeps the scores' arguments and returns a
placeholder; the second one selects from the arguments of its placeholder.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

import dsa

LEAST_KEYS, LEAST_QUERIES = 65536, 1024  # with fewer, scores and top-k are faster as two ops

_Scores = Callable[..., torch.Tensor]
_kept: list[tuple[torch.Tensor, tuple[Any, ...]]] = []  # the placeholder of the latest scores, and their arguments


def mqa_logits(original: _Scores) -> _Scores:
    """`fp8_fp4_mqa_logits` of DeepGEMM, or the function by which the part `scores` has replaced it."""

    @functools.wraps(original)
    def scores(q: Any, kv: Any, weights: torch.Tensor, ks: Any, ke: Any, max_seqlen_k: int = 0, *plan: Any) -> Any:
        _kept.clear()
        queries = q[0]
        if q[1] is not None or max_seqlen_k < LEAST_KEYS or len(queries) < LEAST_QUERIES:
            return original(q, kv, weights, ks, ke, max_seqlen_k, *plan)
        placeholder = weights.new_empty(len(queries), 1)
        _kept.append((placeholder, (queries, kv, weights, ks, ke)))
        return placeholder

    return scores


def topk_prefill(original: Callable[..., None]) -> Callable[..., None]:
    """`top_k_per_row_prefill` of vLLM, or the function by which the part `topk` has replaced it."""

    @functools.wraps(original)
    def topk(
        logits: torch.Tensor,
        cu_seqlen_ks: torch.Tensor,
        cu_seqlen_ke: torch.Tensor,
        raw_topk_indices: torch.Tensor,
        num_rows: int,
        stride0: int,
        stride1: int,
        topk_tokens: int,
    ) -> None:
        if _kept and _kept[0][0] is logits:
            _, arguments = _kept.pop()
            raw_topk_indices.copy_(dsa.indexer_select(*arguments, topk_tokens))
        else:
            original(*(logits, cu_seqlen_ks, cu_seqlen_ke, raw_topk_indices, num_rows, stride0, stride1, topk_tokens))

    return topk
