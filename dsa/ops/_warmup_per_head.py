"""Bridge to the kernels of the per-head warm-up loss and its gradients: arguments, scratch memory, launches.

`slots`, int32 [S, 8], says which queries belong together: up to 128 consecutive ones of a sequence, in the order of the
sequences and of their queries. A row is first query, number of queries (0: unused), the sequence's first key, its keys,
how many of them the first query sees (may be below 0), how many more each query sees than the one before (0 or 1),
anything, sequence.
"""

import torch

from dsa import backends

from ._kernel_arguments import check_rows, check_same_device, dtype_name

DIMS = (64, 128, 192)
INDEX_DIMS = (64, 128)
# Heads that run through the slots together: a slot's gradients wait for those of the slot before, and rarely if there
# are many; but what they add to should fit in the L2 cache.
LEAST_TOGETHER, MOST_TOGETHER = 16, 64
CACHE_BYTES = 32 << 20
TILE = 64
SUM_WARPS = 4


def per_head_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    w: torch.Tensor,
    lse: torch.Tensor,
    slots: torch.Tensor,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(kl [Tq, H], lse_idx [H, Tq]), fp32; w fp32 [Tq, H], lse fp32 [H, Tq] of the attention, +inf without keys."""
    _check(q, k, q_idx, k_idx, w, lse, slots)
    tokens, heads, _ = q.shape
    if k.shape[0] == 0 or q.numel() == 0:
        return w.new_zeros(tokens, heads), w.new_full((heads, tokens), torch.inf)
    from dsa.kernels.per_head_kl_sm90 import compile_per_head_kl

    kl, lse_idx = w.new_empty(tokens, heads), w.new_empty(heads, tokens)
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    launch = compile_per_head_kl(q.shape[2], q_idx.shape[2])
    with backends.on_device(q):
        inputs = q, k, q_idx, k_idx[:, None], w, lse, slots
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
    slots: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq_idx [Tq, H, di], dk_idx [Tk, di] in bf16, dw [Tq, H] in fp32) for g fp32 [Tq, H], the gradient of kl."""
    _check(q, k, q_idx, k_idx, w, lse, slots)
    (tokens, heads, dim), (keys, index_dim) = q.shape, k_idx.shape
    for name, x, shape in (("lse_idx", lse_idx, (heads, tokens)), ("g", g, (tokens, heads))):
        _check_floats(name, x, shape)
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if x.dtype != torch.int32 or x.dim() != 1 or not x.is_contiguous():
            raise ValueError(f"{name}: must be contiguous int32 [B + 1], got {x.dtype} {list(x.shape)}")
    check_same_device(("q", q), lse_idx=lse_idx, g=g, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if keys == 0 or q.numel() == 0:
        return torch.zeros_like(q_idx), torch.zeros_like(k_idx), torch.zeros_like(w)
    from dsa.kernels.per_head_gradient_sm90 import compile_per_head_gradient
    from dsa.kernels.per_head_key_sum_sm90 import compile_per_head_key_sum

    count, batch = len(slots), len(cu_seqlens_k) - 1
    dq_idx, dw = q_idx.new_empty(tokens, heads, index_dim), w.new_empty(tokens, heads)
    dk_idx = k_idx.new_empty(keys, index_dim)
    zeros = torch.zeros(1 + heads * count * SUM_WARPS, dtype=torch.int32, device=q.device)
    parts = w.new_empty(heads, keys // TILE + batch, TILE * index_dim)
    launch, launch_sum = compile_per_head_gradient(dim, index_dim), compile_per_head_key_sum(index_dim)
    counter, done = zeros[:1], zeros[1:].view(heads, count, SUM_WARPS)
    together = _together(heads, keys // max(batch, 1) * index_dim * 4)
    with backends.on_device(q):
        inputs = q, k, q_idx, k_idx[:, None], w, lse, lse_idx, g, slots
        launch(*inputs, counter, done, dq_idx, dw, parts, softmax_scale, together, backends.num_sms(q.device))
        launch_sum(parts, cu_seqlens_q, cu_seqlens_k, dk_idx)
    return dq_idx, dk_idx, dw


def _together(heads: int, bytes_of_head: int = 0) -> int:
    """A divisor of `heads`. bytes_of_head: a sequence's part of a head, which slot after slot adds to."""
    most = max(LEAST_TOGETHER, min(MOST_TOGETHER, CACHE_BYTES // max(bytes_of_head, 1)))
    return next(n for n in range(min(most, heads), 0, -1) if heads % n == 0)


def _check(q, k, q_idx, k_idx, w, lse, slots) -> None:
    for name, x, rank in (("q", q, 3), ("k", k, 3), ("q_idx", q_idx, 3), ("k_idx", k_idx, 2)):
        if x.dtype != torch.bfloat16 or x.dim() != rank:
            raise ValueError(
                f"{name}: must be bfloat16 with {rank} dimensions, got {dtype_name(x.dtype)} {list(x.shape)}"
            )
        check_rows(name, x)
    tokens, heads, dim = q.shape
    if dim not in DIMS:
        raise ValueError(f"q: head dims are {DIMS}, got {dim}")
    if k.shape[2] != dim or k.shape[1] == 0 or heads % k.shape[1]:
        raise ValueError(f"k: must be [Tk, Hk, {dim}], Hk a divisor of {heads}, got {list(k.shape)}")
    if q_idx.shape[:2] != q.shape[:2] or q_idx.shape[2] not in INDEX_DIMS:
        raise ValueError(f"q_idx: must be [{tokens}, {heads}, 64 or 128], got {list(q_idx.shape)}")
    if k_idx.shape != (len(k), q_idx.shape[2]):
        raise ValueError(f"k_idx: must be [{len(k)}, {q_idx.shape[2]}], got {list(k_idx.shape)}")
    _check_floats("w", w, (tokens, heads))
    _check_floats("lse", lse, (heads, tokens))
    if slots.dtype != torch.int32 or slots.dim() != 2 or slots.shape[1] != 8 or not slots.is_contiguous():
        raise ValueError(f"slots: must be contiguous int32 [S, 8], got {slots.dtype} {list(slots.shape)}")
    check_same_device(("q", q), k=k, q_idx=q_idx, k_idx=k_idx, w=w, lse=lse, slots=slots)


def _check_floats(name: str, x: torch.Tensor, shape: tuple[int, int]) -> None:
    if x.dtype != torch.float32 or x.shape != shape or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(
            f"{name}: must be float32 {list(shape)}, its rows contiguous, got {dtype_name(x.dtype)} {list(x.shape)}"
        )
