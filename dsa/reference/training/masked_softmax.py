"""Shared parts of the training references: softmax and KL over the keys that a query sees, and their gradients.

Callers pass logits, scores and p in fp32, or in float64 if their inputs are float64 (`work_dtype`).
"""

import torch


def work_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def masked_softmax(logits: torch.Tensor, visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (softmax, LSE) over the visible keys in the last dimension.

    Other keys have weight 0. A query without visible keys has LSE +inf.
    """
    some = visible.any(-1)
    # The gradient of a row of -inf is NaN, so rows without a visible key are not masked here.
    masked = logits.masked_fill(~visible & some[..., None], -torch.inf)
    weights = masked.softmax(-1).masked_fill(~some[..., None], 0.0)
    if logits.shape[-1] == 0:
        return weights, logits.sum(-1) + torch.inf
    return weights, masked.logsumexp(-1).masked_fill(~some, torch.inf)


def kl_divergence(p: torch.Tensor, scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Return KL(p || softmax(scores)) over the visible keys in the last dimension; 0 if no key is visible. p must be 0
    for the other keys."""
    if scores.shape[-1] == 0:
        return scores.sum(-1)
    some = visible.any(-1)
    log_q = scores.masked_fill(~visible & some[..., None], -torch.inf).log_softmax(-1).masked_fill(~visible, 0.0)
    return (torch.special.xlogy(p, p) - p * log_q).sum(-1)


def kl_gradient(p: torch.Tensor, scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Return the gradient of `kl_divergence` with respect to the scores: softmax(scores) sum(p) - p."""
    return masked_softmax(scores, visible)[0] * p.sum(-1, keepdim=True) - p


def index_scores_gradient(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and weights for the gradient `grad` [T, N] of `index_scores(q, k, weights)`, in
    grad's dtype.

    q [T, H, D], k [N, D] or [T, N, D], weights [T, H]
    """
    q, k, weights = (x.to(grad.dtype).contiguous() for x in (q, k, weights))
    products = q @ k.mT
    of_products = grad[:, None] * weights[..., None] * (products > 0)
    of_k = torch.einsum("thn,thd->tnd" if k.dim() == 3 else "thn,thd->nd", of_products, q)
    return of_products @ k, of_k, (torch.relu(products) @ grad[..., None]).squeeze(-1)


def selected(indices: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (row numbers [Tq, K], whether each is valid) of indices [Tq, 1, K]. An invalid index becomes the row
    number `keys`, for which `rows_of` gives zeros and which `sum_of_rows` drops."""
    index = indices[:, 0].long()
    valid = (index >= 0) & (index < keys)
    return index.masked_fill(~valid, keys), valid


def rows_of(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the rows of x at these indices; index len(x) gives zeros."""
    return torch.nn.functional.pad(x, (0, 0, 0, 1))[index]


def sum_of_rows(rows: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    """Return [count, D]: for each row number, the sum of the `rows` [Tq, K, D] that have it in `index`. The number
    `count` is dropped."""
    sums = rows.new_zeros(count + 1, rows.shape[-1])
    return sums.index_add_(0, index.flatten(), rows.flatten(0, 1))[:count]
