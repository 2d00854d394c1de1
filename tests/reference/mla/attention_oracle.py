"""Attention of one query head over a list of keys in float64, written out as the formula."""

import math

import torch


def attend_one(
    q: torch.Tensor, keys: torch.Tensor, scale: float, d_v: int, sink: float | None = None
) -> tuple[torch.Tensor, float, float]:
    """q [d], keys [n, d] -> (out [d_v] float64, lse, max_logit). No keys: (0, +inf, -inf)."""
    q, keys = q.double(), keys.double()
    if len(keys) == 0:
        return torch.zeros(d_v, dtype=torch.float64), math.inf, -math.inf
    logits = [scale * float(torch.dot(q, k)) for k in keys]
    largest = max(logits)
    terms = [math.exp(z - largest) for z in logits]
    lse = largest + math.log(sum(terms))
    out = sum(t / sum(terms) * k[:d_v] for t, k in zip(terms, keys))
    if sink is not None:
        out = out * (0.0 if sink == math.inf else math.exp(lse) / (math.exp(lse) + math.exp(sink)))
    return out, lse, largest


def attend_rows(
    q: torch.Tensor, keys: list[torch.Tensor], scale: float, d_v: int, sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [R, H, d] and one key tensor [n_r, d] per row -> out [R, H, d_v], lse [R, H] and max_logits [R, H]."""
    rows, heads, _ = q.shape
    out = torch.zeros(rows, heads, d_v, dtype=torch.float64)
    lse, largest = torch.zeros(rows, heads, dtype=torch.float64), torch.zeros(rows, heads, dtype=torch.float64)
    for r in range(rows):
        for h in range(heads):
            s = None if sink is None else float(sink[h])
            out[r, h], lse[r, h], largest[r, h] = attend_one(q[r, h], keys[r], scale, d_v, s)
    return out, lse, largest


def assert_near(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
