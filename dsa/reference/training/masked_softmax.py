"""What the references of training share: softmax and KL over the keys that a query sees, and rows that indices name.

Everything is computed in fp32, of float64 inputs in float64, and differentiable.
"""

import torch

from dsa.runtime.checks import FLOATS

DTYPES = (*FLOATS, torch.float64)


def work_dtype(x: torch.Tensor) -> torch.dtype:
    """What a reference computes in: float64 for float64 inputs, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def masked_softmax(logits: torch.Tensor, visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Over the visible of the last dimension, zeros elsewhere; and the LSE, +inf where nothing is visible."""
    some = visible.any(-1)
    # What is nowhere visible is left as it is: a row of -inf has a gradient of NaN.
    masked = logits.masked_fill(~visible & some[..., None], -torch.inf)
    weights = masked.softmax(-1).masked_fill(~some[..., None], 0.0)
    if logits.shape[-1] == 0:
        return weights, logits.sum(-1) + torch.inf
    return weights, masked.logsumexp(-1).masked_fill(~some, torch.inf)


def kl_divergence(p: torch.Tensor, scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """KL(p || softmax(scores)) over the visible of the last dimension; 0 where nothing is."""
    if scores.shape[-1] == 0:
        return scores.sum(-1)
    some = visible.any(-1)
    log_q = scores.masked_fill(~visible & some[..., None], -torch.inf).log_softmax(-1).masked_fill(~visible, 0.0)
    return (torch.special.xlogy(p, p) - p * log_q).sum(-1)


def selected(indices: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows [Tq, K], `keys` where there is none, and where there are)."""
    index = indices[:, 0].long()
    valid = (index >= 0) & (index < keys)
    return index.masked_fill(~valid, keys), valid


def rows_of(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of x, and zeros for the one behind its last."""
    return torch.nn.functional.pad(x, (0, 0, 0, 1))[index]
