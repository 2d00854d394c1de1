"""The softmax attention that most MLA references use: each query attends to a list of keys.

A key's value is its first d_v channels. A query without keys has output 0, LSE +inf and largest logit -inf.
"""

import torch

# Elements of the tensor [queries, K, D] of gathered keys: 256 MiB in fp32 on a GPU, 4 MiB, for the caches, on a CPU.
_CHUNK, _CPU_CHUNK = 2**26, 2**20


def queries_at_a_time(keys: int, dim: int, device: torch.device) -> int:
    """Return the number of queries whose keys are gathered at a time."""
    return max(1, (_CPU_CHUNK if device.type == "cpu" else _CHUNK) // max(1, keys * dim))


def attend(
    q: torch.Tensor, kv: torch.Tensor, valid: torch.Tensor, scale: float, d_v: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """softmax_j(scale * q . kv[j]) kv[j, :d_v] over the valid j.

    q [R, H, D] float, kv [R, K, D] fp32 with zeros where `valid` [R, K] is False, because a NaN there would reach the
    sum.
    Returns out [R, H, d_v], lse [R, H] (natural log) and max_logits [R, H], the largest scaled logit; all fp32.
    """
    if kv.shape[1] == 0:
        kv, valid = kv.new_zeros(kv.shape[0], 1, kv.shape[2]), valid.new_zeros(kv.shape[0], 1)
    # Contiguous, because the rounding of a product on a CPU depends on strides.
    logits = (q.float().contiguous() @ kv.transpose(1, 2) * scale).masked_fill(~valid.unsqueeze(1), -torch.inf)
    max_logits = logits.amax(2)
    lse = logits.logsumexp(2)
    empty = lse == -torch.inf
    weights = (logits - lse.masked_fill(empty, 0.0).unsqueeze(2)).exp()
    return weights @ kv[..., :d_v], lse.masked_fill(empty, torch.inf), max_logits


def gather_attend(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float, d_v: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `attend` over the rows of kv that `indices` names: q [R, H, D], kv [N, D], indices [R, K].

    An index outside [0, N) names no key.
    """
    keys = kv.shape[0]
    padded = torch.nn.functional.pad(kv.float(), (0, 0, 0, 1))  # invalid indices gather row N, which is zeros
    chunk = queries_at_a_time(indices.shape[1], kv.shape[1], kv.device)
    parts = []
    for q_part, index in zip(q.split(chunk), indices.long().split(chunk)):
        valid = (index >= 0) & (index < keys)
        # padded[...] takes twice as long on a CPU, and the gradients of index_select are not deterministic on a GPU.
        rows = torch.nn.functional.embedding(torch.where(valid, index, keys), padded)
        parts.append(attend(q_part, rows, valid, scale, d_v))
    out, lse, max_logits = (torch.cat(x) for x in zip(*parts))
    return out, lse, max_logits


def apply_sink(out: torch.Tensor, lse: torch.Tensor, attn_sink: torch.Tensor) -> torch.Tensor:
    """Return out * e^lse / (e^lse + e^sink): out [..., H, d_v], lse [..., H], attn_sink [H].

    A sink of -inf changes nothing; a sink of +inf gives zeros. A row without keys, whose lse is +inf, becomes zeros.
    """
    empty = lse == torch.inf
    # The gradient of sigmoid is y (1 - y), and in fp32 1 - y is 0 from lse - sink = 17 on. The gradient of logsigmoid
    # is sigmoid(sink - lse), with full precision.
    share = torch.nn.functional.logsigmoid(lse.masked_fill(empty, 0.0) - attn_sink).exp()
    return out * share.masked_fill(empty, 0.0).unsqueeze(-1)
