"""vLLM's attention backend FLASHMLA_SPARSE on dsa's ops, under the same name. vLLM imports this module by its path.

Differences from vLLM's backend:
- Queries keep their number of heads. vLLM pads it to 64 or 128.
- Prefill over an FP8 cache always converts the keys to bf16. With fewer than 32 heads, vLLM computes prefill as decode.
  With decode context parallelism this stays so, because only that path returns the LSE of every token.
"""

import torch
from vllm.v1.attention.backends.mla.flashmla_sparse import (
    FlashMLASparseBackend,
    FlashMLASparseImpl,
    FlashMLASparseMetadata,
    FlashMLASparseMetadataBuilder,
)

from dsa_engines.vllm import adapters


class DSASparseMetadataBuilder(FlashMLASparseMetadataBuilder):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.dcp_world_size == 1:
            self.fp8_use_mixed_batch = False


class DSASparseImpl(FlashMLASparseImpl):
    def _fp8_flash_mla_kernel(
        self,
        q: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        kernel_metadata: FlashMLASparseMetadata.FP8KernelMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return adapters.fp8_attention(q, kv_c_and_k_pe_cache, topk_indices, self.softmax_scale)

    def _bf16_flash_mla_kernel(
        self,
        q: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        topk_length: torch.Tensor | None = None,
        actual_num_heads: int | None = None,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heads = q.shape[1] if actual_num_heads is None else actual_num_heads
        return adapters.bf16_attention(
            q, kv_c_and_k_pe_cache, topk_indices, self.softmax_scale, topk_length, heads, out
        )


class DSASparseBackend(FlashMLASparseBackend):
    @staticmethod
    def get_builder_cls() -> type[DSASparseMetadataBuilder]:
        return DSASparseMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[DSASparseImpl]:
        return DSASparseImpl
