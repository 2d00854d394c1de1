"""Attention over lists of keys in float64, written out as the formula."""

import math

import torch


def attend(
    q: torch.Tensor, keys: torch.Tensor, scale: float, d_v: int, sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [H, d], keys [n, d], sink [H] -> out [H, d_v], lse [H], max_logits [H]. No keys: 0, +inf, -inf."""
    q, keys = q.double(), keys.double()
    if len(keys) == 0:
        return q.new_zeros(len(q), d_v), q.new_full((len(q),), math.inf), q.new_full((len(q),), -math.inf)
    logits = scale * q @ keys.T
    out, lse = logits.softmax(1) @ keys[:, :d_v], logits.logsumexp(1)
    if sink is not None:
        out = out * (lse - sink.double()).sigmoid()[:, None]
    return out, lse, logits.amax(1)


def attend_rows(
    q: torch.Tensor, keys: list[torch.Tensor], scale: float, d_v: int, sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [R, H, d] and one key tensor [n_r, d] per row -> out [R, H, d_v], lse [R, H] and max_logits [R, H]."""
    rows = [attend(row, own, scale, d_v, sink) for row, own in zip(q, keys, strict=True)]
    out, lse, largest = map(torch.stack, zip(*rows))
    return out, lse, largest


def assert_near(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)
