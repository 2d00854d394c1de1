"""Attention of packed sequences in training, with gradients: multi-head attention, or absorbed attention to latents."""

import math

import torch

from dsa.ops.mla.flash_mla_sparse_fwd import flash_mla_sparse_fwd
from dsa.ops.mla.mha_varlen_fwd import _mha_varlen_fwd
from dsa.ops.training._uncovered_rows import fill_uncovered
from dsa.ops.training.sparse_mla_attention import gradients as sparse_gradients
from dsa.runtime.declare import tma_rows

ABSORBED = 576, 512
MOST_INDICES = 16 << 20  # limit per chunk of queries in absorbed attention; each query has max_seqlen_k indices
# The backward pass of PyTorch's flash attention keeps q's gradient as fp32 sums. Before commit b62d93f3 (2026) the
# offsets into these sums have 32 bits, and overflow if there are MOST_NUMBERS sums or more.
MOST_NUMBERS = 1 << 31
Sequences = tuple[torch.Tensor, torch.Tensor, int, int]


def attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out [Tq, H, dv], lse [H, Tq]). sequences: (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), where
    both cu_seqlens ascend and lie inside the tensors."""
    if (q.shape[2], v.shape[2]) != ABSORBED:
        cu_q, cu_k, _, longest = sequences
        results = _mha_varlen_fwd.launch_on(q.device, q, k, v, cu_q, cu_k, longest, scale, causal, None, None, 0, None)
        fill_uncovered(cu_q, (results[0], 0.0), (results[1].T, math.inf))
        return results
    out, k = q.new_empty(*q.shape[:2], v.shape[2]), tma_rows(k)
    lse = q.new_empty(len(q), q.shape[1], dtype=torch.float32)
    for rows, indices, visible in _selections(sequences, len(q), causal):
        out[rows], _, lse[rows] = flash_mla_sparse_fwd(q[rows], k, indices, scale, topk_length=visible)
    return out, lse.T.contiguous()


def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sequences: Sequences,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the gradients of q, k and v. In absorbed attention v is a view of k. So the gradient of k includes that of
    v, and the third result is None."""
    if (q.shape[2], v.shape[2]) != ABSORBED:
        return flash_backward(grad, q, k, v, out, lse, sequences, scale, causal)
    dq, dk = torch.empty_like(q), torch.zeros(k.shape, dtype=torch.float32, device=k.device)
    k, deterministic = tma_rows(k), torch.are_deterministic_algorithms_enabled()
    lse = lse.T.contiguous()
    for rows, indices, visible in _selections(sequences, len(q), causal):
        seen = torch.arange(indices.shape[2], device=q.device) < visible[:, None, None]
        indices = torch.where(seen, indices, -1)
        parts = q[rows], k, indices, scale, None, out[rows], lse[rows], grad[rows], None, deterministic
        dq[rows], part, _ = sparse_gradients(*parts)
        dk += part
    return dq, dk.to(k.dtype), None


def _selections(sequences: Sequences, queries: int, causal: bool):
    """Yield (rows, indices, visible) per chunk of n queries: the slice of the queries, indices [n, 1, max_seqlen_k]
    into the packed keys, and visible [n]. A query sees only the first `visible` of these indices."""
    cu_q, cu_k, _, most = sequences
    if queries == 0:
        return
    row = torch.arange(queries, device=cu_q.device, dtype=torch.int32)
    # The rows before the first and after the last sequence count as two more sequences, without keys.
    sequence = torch.searchsorted(cu_q, row, right=True, out_int32=True).long()
    ends = torch.nn.functional.pad(cu_q, (1, 0)), torch.nn.functional.pad(cu_q, (0, 1), value=queries)
    begin, end = (x[sequence] for x in ends)
    first = torch.nn.functional.pad(cu_k, (1, 0))[sequence]
    keys = torch.nn.functional.pad(cu_k.diff(), (1, 1))[sequence]
    visible = keys
    if causal:
        visible = (keys - (end - begin) + row - begin + 1).clamp(min=0).minimum(keys)
    visible = visible.clamp(max=most)
    offsets = torch.arange(most, device=cu_q.device, dtype=torch.int32)
    step = max(1, MOST_INDICES // max(most, 1))
    for begin in range(0, queries, step):
        rows = slice(begin, min(begin + step, queries))
        yield rows, (first[rows, None] + offsets)[:, None], visible[rows]


def flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sequences: Sequences,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v, computed by PyTorch's flash attention. Without queries, keys or sequences,
    where PyTorch's op raises an error, the gradients are 0. They are also 0 in rows that it does not write: rows
    outside all sequences, and rows of a sequence after the maximum length."""
    cu_seqlens_q, cu_seqlens_k, longest_q, longest_k = sequences
    if 0 in (len(q), len(k), len(cu_seqlens_q) - 1):
        return torch.zeros_like(q), torch.zeros_like(k), empty_values_gradient(q, v).zero_()
    dq, dk, dv = _flash_backward(grad, q, k, v, out, lse, sequences, scale, causal)
    fill_uncovered(cu_seqlens_q, (dq, 0.0), most=longest_q)
    fill_uncovered(cu_seqlens_k, (dk, 0.0), (dv, 0.0), most=longest_k)
    return dq, dk, dv


def _flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sequences: Sequences,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    together = _heads_together(heads, group, (len(q) + 128 * len(sequences[0])) * -(-q.shape[2] // 64) * 64)
    if together == heads:
        return _flash_backward_of_heads((grad, q, k, v, out, lse), sequences, scale, causal)
    dq, sums = q.new_empty(q.shape), torch.float32 if together < group else k.dtype
    dk, dv = torch.zeros(k.shape, dtype=sums, device=k.device), torch.zeros(v.shape, dtype=sums, device=k.device)
    for first in range(0, heads, together):
        own = slice(first, first + together)
        shared = slice(first // group, -(-own.stop // group))
        of_heads = grad[:, own], q[:, own], k[:, shared], v[:, shared], out[:, own], lse[own]
        dq[:, own], dk_part, dv_part = _flash_backward_of_heads(of_heads, sequences, scale, causal)
        dk[:, shared] += dk_part
        dv[:, shared] += dv_part
    return dq, dk.to(k.dtype), empty_values_gradient(q, v).copy_(dv)


def empty_values_gradient(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Allocate v's gradient with the strides that PyTorch's flash attention gives it. There, values are padded to q's
    number of channels, so the gradient is a slice of a tensor with q's channels."""
    return v.new_empty(*v.shape[:2], q.shape[2])[..., : v.shape[2]]


def _heads_together(heads: int, group: int, numbers: int) -> int:
    """Return how many heads a call of PyTorch's op can take, each with `numbers` sums of q's gradient. This is all
    heads, a multiple of the `group` heads that share keys, or a divisor of `group`."""
    most = max(1, (MOST_NUMBERS - 1) // numbers)
    if most >= heads:
        return heads
    if most >= group:
        return most // group * group
    return next(n for n in range(most, 0, -1) if group % n == 0)


def _flash_backward_of_heads(
    tensors: tuple[torch.Tensor, ...], sequences: Sequences, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """PyTorch's op requires as many channels in values as in queries, and rows at multiples of 16 bytes."""
    grad, q, k, v, out, lse = tensors
    q, k, v = (tma_rows(x) for x in (q, k, v))
    dim, missing = v.shape[2], q.shape[2] - v.shape[2]
    if missing:
        grad, v, out = (torch.nn.functional.pad(x, (0, missing)) for x in (grad, v, out))
    unused = [q.new_empty(n, dtype=torch.uint64) for n in (2, 0)]  # state of dropout, which is off
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *(tma_rows(grad.contiguous()), q, k, v, out, lse, *sequences, 0.0, causal, *unused), scale=scale
    )
    return dq, dk, dv[..., :dim]
