"""The lightning indexer's score of a key for a query, used by the logits of serving and by the losses of training."""

import torch


def index_scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """I[t, s] = sum_h weights[t, h] * relu(q[t, h] . k[s]), in fp32, or in float64 if q is float64.

    q        [..., H, D] of any float dtype: [T, H, D] for T queries
    k        [N, D], keys that all queries score, or [..., N, D], separate keys for each query
    weights  [..., H], of any sign

    Returns [..., N]. Differentiable in q, k and weights. NaN in a key reaches only that key's scores. To get the scores
    of each head, pass every head as a query with H = 1: q[..., None, :], weights[..., None]. The arguments are not
    checked. Source: DeepSeek-V3.2 (arXiv 2512.02556), equation 1.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    # Contiguous, because the rounding of a product on a CPU depends on strides.
    q, k, weights = (x.to(dtype).contiguous() for x in (q, k, weights))
    return (weights.unsqueeze(-2) @ torch.relu(q @ k.mT)).squeeze(-2)
