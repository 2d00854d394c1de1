"""vllm/model_executor/layers/indexer_topk.py: `sparse_indexer_topk_backend="dsa"`, exact and deterministic."""

import torch


def topk_prefill(logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, out: torch.Tensor) -> None:
    """In the place of `ops.top_k_per_row_prefill`. Of equal scores the lowest index is selected."""
    import dsa

    dsa.topk_indices(logits, out.shape[1], starts=starts, lengths=ends - starts, out=out)


def topk_decode(logits: torch.Tensor, seq_lens: torch.Tensor, next_n: int, out: torch.Tensor) -> None:
    """In `SparseIndexerTopk.forward`. seq_lens [B, next_n]: the keys of each query; [B] or [B, 1]: those of a sequence,
    of whose queries each sees one key more than the one before it."""
    import dsa

    if seq_lens.numel() != len(logits):
        steps = torch.arange(1 - next_n, 1, dtype=torch.int32, device=seq_lens.device)
        seq_lens = (seq_lens.reshape(-1, 1) + steps).clamp_(min=0)
    dsa.topk_indices(logits, out.shape[1], lengths=seq_lens.reshape(-1), out=out)
