"""vLLM's `fused_q` of DeepSeek-V3.2 and GLM-5 on dsa's ops: queries' rotary embedding, and the index queries in FP8."""

import functools
from collections.abc import Callable

import torch

import dsa

LEAST_TOKENS = 512  # for fewer, vLLM's one kernel is faster than the launches of several


def fused_q(original: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., tuple[torch.Tensor, ...]]:
    @functools.wraps(original)
    def prepare(
        positions: torch.Tensor,
        q_pe: torch.Tensor,
        q_pe_cos_sin_cache: torch.Tensor,
        index_q: torch.Tensor | None,
        index_q_cos_sin_cache: torch.Tensor | None,
        ql_nope: torch.Tensor,
        q_scale: torch.Tensor,
        index_weights: torch.Tensor | None,
        index_weights_softmax_scale: float,
        index_weights_head_scale: float,
        has_indexer: bool = True,
        index_rope_interleave: bool = False,
        quantize_mqa: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
        """(index_q in e4m3 [T, heads, D], index weights times their scales fp32 [T, heads], rotated q_pe)."""
        if quantize_mqa or len(q_pe) < LEAST_TOKENS:
            return original(
                *(positions, q_pe, q_pe_cos_sin_cache, index_q, index_q_cos_sin_cache, ql_nope, q_scale),
                *(index_weights, index_weights_softmax_scale, index_weights_head_scale),
                has_indexer=has_indexer,
                index_rope_interleave=index_rope_interleave,
                quantize_mqa=quantize_mqa,
            )
        rotated = dsa.apply_rotary(q_pe, *_cos_sin(q_pe_cos_sin_cache, positions), interleaved=True)
        if not has_indexer:
            return None, None, rotated
        cos, sin = _cos_sin(index_q_cos_sin_cache, positions)
        # vLLM reads these queries nowhere else.
        dsa.apply_rotary(index_q, cos, sin, interleaved=index_rope_interleave, dims="first", out=index_q)
        q, scale = dsa.per_token_cast_to_fp8(index_q.view(-1, index_q.shape[-1]))
        weights = scale.view(index_weights.shape) * index_weights
        weights *= index_weights_softmax_scale * index_weights_head_scale
        return q.view(index_q.shape), weights, rotated

    return prepare


def _cos_sin(cache: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return cache[positions].float().chunk(2, dim=-1)
