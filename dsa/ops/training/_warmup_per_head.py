"""The warm-up's loss of each head by itself, and its gradients: scratch memory and launches.

`q_tiles`, int32 [S, 8], says which queries belong together: up to 128 consecutive ones of a sequence, in the order of
the sequences and of their queries. A row is first query, number of queries (0: unused), the sequence's first key, its
keys, how many of them the first query sees (may be below 0), how many more each query sees than the one before (0 or
1), anything, sequence.

Nothing is checked here. q, k, q_idx and k_idx are bf16, their rows at multiples of 16 bytes, the rest contiguous; d is
of PER_HEAD_CHANNELS, di of INDEX_CHANNELS (the kernels' limits.py).
"""

import torch

from dsa.kernels.training.limits import PER_HEAD_KEY_TILE, PER_HEAD_KEY_WARPS
from dsa.ops.training._uncovered_rows import fill_uncovered
from dsa.runtime import backends

# Heads that run through the q tiles together: a q tile's gradients wait for those of the q tile before, and rarely if
# there are many; but what they add to should fit in the L2 cache.
LEAST_TOGETHER, MOST_TOGETHER = 16, 64
CACHE_BYTES = 32 << 20


def per_head_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    w: torch.Tensor,
    lse: torch.Tensor,
    q_tiles: torch.Tensor,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(kl [Tq, H], lse_idx [H, Tq]), fp32; w fp32 [Tq, H], lse fp32 [H, Tq] of the attention, +inf without keys."""
    from dsa.kernels.training.per_head_kl_sm90 import compile_per_head_kl

    tokens, heads, dim = q.shape
    if 0 in (len(k), q.numel(), len(q_tiles)):
        return w.new_zeros(tokens, heads), w.new_full((heads, tokens), torch.inf)
    # Of queries in no q tile the former is 0, and nobody reads the latter.
    kl, lse_idx = w.new_zeros(tokens, heads), w.new_empty(heads, tokens)
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    launch = compile_per_head_kl(dim, q_idx.shape[2])
    with backends.on_device(q):
        inputs = q, k, q_idx, k_idx[:, None], w, lse, q_tiles
        launch(*inputs, counter, kl, lse_idx, softmax_scale, _together(heads), backends.num_sms(q.device))
    return kl, lse_idx


def per_head_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    w: torch.Tensor,
    lse: torch.Tensor,
    lse_idx: torch.Tensor,
    g: torch.Tensor,
    q_tiles: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq_idx [Tq, H, di], dk_idx [Tk, di] in bf16, dw [Tq, H] in fp32) for g fp32 [Tq, H], the gradient of kl. The
    q tiles are those of cu_seqlens_*, which ascend inside the tensors."""
    from dsa.kernels.training.per_head_gradient_sm90 import compile_per_head_gradient
    from dsa.kernels.training.per_head_key_sum_sm90 import compile_per_head_key_sum

    (tokens, heads, dim), (keys, index_dim) = q.shape, k_idx.shape
    if 0 in (keys, q.numel(), len(q_tiles)):
        return torch.zeros_like(q_idx), torch.zeros_like(k_idx), torch.zeros_like(w)
    count, batch = len(q_tiles), len(cu_seqlens_k) - 1
    dq_idx, dw = q_idx.new_empty(tokens, heads, index_dim), w.new_empty(tokens, heads)
    dk_idx = k_idx.new_empty(keys, index_dim)
    zeros = torch.zeros(1 + heads * count * PER_HEAD_KEY_WARPS, dtype=torch.int32, device=q.device)
    parts = w.new_empty(heads, keys // PER_HEAD_KEY_TILE + batch, PER_HEAD_KEY_TILE * index_dim)
    launch, launch_sum = compile_per_head_gradient(dim, index_dim), compile_per_head_key_sum(index_dim)
    counter, done = zeros[:1], zeros[1:].view(heads, count, PER_HEAD_KEY_WARPS)
    together = _together(heads, keys // max(batch, 1) * index_dim * 4)
    with backends.on_device(q):
        inputs = q, k, q_idx, k_idx[:, None], w, lse, lse_idx, g, q_tiles
        launch(*inputs, counter, done, dq_idx, dw, parts, softmax_scale, together, backends.num_sms(q.device))
        launch_sum(parts, cu_seqlens_q, cu_seqlens_k, dk_idx)
    fill_uncovered(cu_seqlens_q, (dq_idx, 0.0), (dw, 0.0))
    fill_uncovered(cu_seqlens_k, (dk_idx, 0.0))
    return dq_idx, dk_idx, dw


def _together(heads: int, bytes_of_head: int = 0) -> int:
    """A divisor of `heads`. bytes_of_head: a sequence's part of a head, which q tile after q tile adds to."""
    most = max(LEAST_TOGETHER, min(MOST_TOGETHER, CACHE_BYTES // max(bytes_of_head, 1)))
    return next(n for n in range(min(most, heads), 0, -1) if heads % n == 0)
