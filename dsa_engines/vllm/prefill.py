"""Multi-head attention with a mask for prompts of DeepSeek-V3.2 and GLM-5, where it is faster than sparse attention.

vLLM attends to prompts of at most top-k tokens with the keys and values of every head, and to longer ones over the
latents. Here the multi-head form, with the selected keys marked by one bit each, continues up to the length at which
the other form becomes faster.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

import dsa
from dsa_layers.engine.attention_form import EXPANDED_BYTES, HeadSizes, multi_head_is_faster

BACKEND = "FLASHMLA_SPARSE"
CACHES = ("auto", "bfloat16", "fp8_ds_mla")


def is_served(attention: Any) -> bool:
    """Whether a layer's caches and GPUs are those that `forward_mha` serves. attention: the layer's implementation."""
    return attention.kv_cache_dtype in CACHES and attention.dcp_world_size <= 1 and attention.pcp_world_size <= 1


def lengths(prefill: Any) -> tuple[list[int], list[int]]:
    """(new tokens of each prompt, all of its tokens)."""
    new = prefill.query_lens_cpu.tolist()
    context = prefill.chunked_context
    before = [0] * len(new) if context is None else context.context_lens_list
    return new, [sum(pair) for pair in zip(new, before, strict=True)]


def use_sparse_mha(original: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """`MLAAttention._use_sparse_mha`: whether a batch's prompts take the multi-head form."""

    @functools.wraps(original)
    def use(self: Any, attn_metadata: Any) -> bool:
        if original(self, attn_metadata):
            return True
        prefill = attn_metadata.prefill
        if (
            prefill is None
            or prefill.query_lens_cpu is None
            or self.hisparse_cache is not None
            or self.attn_backend.get_name() != BACKEND
            or self._vllm_config.attention_config.sparse_mla_force_mqa
            or not is_served(self.impl)
        ):
            return False
        if not hasattr(attn_metadata, "dsa_multi_head"):  # all layers share the metadata
            impl = self.impl
            sizes = HeadSizes(
                impl.num_heads, impl.qk_nope_head_dim, impl.qk_rope_head_dim, impl.v_head_dim, impl.kv_lora_rank
            )
            attn_metadata.dsa_multi_head = multi_head_is_faster(*lengths(prefill), attn_metadata.topk_tokens, sizes)
        return attn_metadata.dsa_multi_head

    return use


def forward_mha(original: Callable[..., None]) -> Callable[..., None]:
    """`SparseMLACommonImpl.forward_mha`: attention of a batch's prompts, to all keys or to the selected ones."""

    @functools.wraps(original)
    def forward(
        self: Any,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        prefill = attn_metadata.prefill
        is_dense = attn_metadata.prefill_max_seq_len <= attn_metadata.topk_tokens
        known = prefill.query_lens_cpu is not None and output_scale is None and is_served(self)
        total = lengths(prefill)[1] if known else []
        expanded = 2 * sum(total) * self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        if not known or (is_dense and expanded > EXPANDED_BYTES):
            return original(
                self, q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale
            )
        ends, latents, rope = prefill.query_start_loc, kv_c_normed, k_pe.squeeze(1)
        if prefill.chunked_context is not None:
            seq_lens = attn_metadata.seq_lens[attn_metadata.num_decodes :]
            ends = torch.nn.functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
            rows = cached_latents(kv_c_and_k_pe_cache, prefill.block_table, ends, sum(total), self.kv_cache_dtype)
            latents, rope = rows.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        keys = self.kv_b_proj(latents.contiguous())[0].view(len(latents), self.num_heads, -1)
        k, v = keys.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        selected = None
        if not is_dense:
            first = attn_metadata.num_decode_tokens
            selected = dsa.selection_bits(self.topk_indices_buffer[first : first + len(q)], None, max(total))
        out, _ = dsa.mha_varlen_fwd(
            *(q, k, v, prefill.query_start_loc, ends, max(total), self.scale),
            k_rope=rope,
            selected=selected,
            dense_keys=0 if is_dense else attn_metadata.topk_tokens,
        )
        output.copy_(out.flatten(1))

    return forward


def cached_latents(
    cache: torch.Tensor, block_table: torch.Tensor, ends: torch.Tensor, count: int, kind: str
) -> torch.Tensor:
    """[count, 576] bf16: the latents of prompts, one after the other, from vLLM's pages.

    ends [B + 1] int32: where each prompt's rows begin
    """
    if kind == "fp8_ds_mla":
        from vllm import _custom_ops

        rows = torch.empty(count, 576, dtype=torch.bfloat16, device=cache.device)
        _custom_ops.cp_gather_and_upconvert_fp8_kv_cache(cache, rows, block_table, ends[:-1], len(block_table))
        return rows
    slots = dsa.slot_mapping(block_table, ends, None, count, cache.shape[1])
    return cache[slots // cache.shape[1], slots % cache.shape[1]]
