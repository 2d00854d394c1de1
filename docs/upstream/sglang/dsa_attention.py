"""Addition to sglang/srt/layers/attention/dsa_backend.py: `--dsa-prefill-backend dsa`, `--dsa-decode-backend dsa`."""

from typing import Any

import torch


class DsaAttention:
    """A method of `DeepseekSparseAttnBackend`, called like `_forward_flashmla_kv`."""

    def _forward_dsa(
        self,
        q_all: torch.Tensor,
        kv_cache: torch.Tensor,
        v_head_dim: int,
        sm_scale: float,
        layer: Any,
        metadata: Any,
        page_table_1: torch.Tensor,
    ) -> torch.Tensor:
        """Sparse attention over a cache of bf16, or of 656 bytes per key, without padding heads to 64 or 128."""
        import dsa

        q = q_all.view(-1, 1, layer.tp_q_head_num, layer.head_dim)
        lengths = metadata.dsa_cache_seqlens_int32
        return dsa.flash_mla_with_kvcache(
            q,
            kv_cache.view(-1, self.physical_page_size, 1, self.kv_cache_dim),
            None,
            None,
            v_head_dim,
            None,  # dsa plans in the call
            softmax_scale=sm_scale,
            is_fp8_kvcache=kv_cache.element_size() == 1,
            indices=page_table_1.unsqueeze(1),
            topk_length=lengths if len(lengths) == len(q) else None,
            enable_batch_invariant=self.num_splits == 1,  # --enable-deterministic-inference
        )[0]
