"""Inputs of attention kernels, attention in float64, and results that are parts of larger tensors."""

import math
from collections.abc import Callable
from typing import Any

import torch

from dsa.testing import assert_close
from tests.gpu.op_checks import assert_same_bits

D_V = 512
INF, NAN = math.inf, math.nan
BF16, FP16 = torch.bfloat16, torch.float16
KINDS = [(576, BF16), (576, FP16), (512, BF16), (512, FP16)]
SINKS = [-INF, INF, 0.0, 5.0, 6.0, 7.0, -1e30, 1e30]


def int32(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device="cuda")


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") / 10).clamp(-1, 1).to(dtype)


def distinct(queries: int, n: int, k: int) -> torch.Tensor:
    """[queries, k]: rows of n for each query, in any order and none twice, or any rows where there are too few."""
    if k > n:
        return torch.randint(0, max(n, 1), (queries, k), dtype=torch.int32, device="cuda")
    return torch.rand(queries, n, device="cuda").argsort(1)[:, :k].int()


def no_keys(n: int) -> torch.Tensor:
    """Every kind of index that is no row of n."""
    return int32([-1, n, -(2**31), 2**31 - 1, n + 1, -2])


def spoiled(indices: torch.Tensor, n: int, share: float) -> torch.Tensor:
    """The indices, a share of them replaced by such as are no rows of n."""
    bad = no_keys(n)[torch.randint(6, indices.shape, device="cuda")]
    return torch.where(torch.rand(indices.shape, device="cuda") < share, bad, indices)


def starts(lengths: list[int]) -> torch.Tensor:
    """Where packed sequences of these lengths begin, and where the last one ends."""
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64: q [T, H, d] over keys [N, Hk, d] and values [N, Hk, dv] where visible [T, N].
    -> out [T, H, dv], and lse [T, H], which is +inf without keys"""
    grouped = q.double().unflatten(1, (keys.shape[1], -1))
    logits = torch.einsum("tkgd,nkd->tkgn", grouped, keys.double()) * scale
    logits = logits.masked_fill(~visible[:, None, None], -INF)
    lse = logits.logsumexp(3)
    empty = lse == -INF
    weights = (logits - lse.masked_fill(empty, 0.0)[..., None]).exp()
    if sink is not None:
        share = torch.sigmoid(lse - sink.double().view(lse.shape[1:]))
        weights *= share.masked_fill(empty, 0.0)[..., None]
    out = torch.einsum("tkgn,nkd->tkgd", weights, values.double())
    return out.flatten(1, 2), lse.masked_fill(empty, INF).flatten(1)


def assert_attention(
    got: tuple, expected: tuple, tolerance: dict[str, float], statistics: dict[str, float], record_error: Any = None
) -> None:
    """out within `tolerance`, and lse, or maxima and lse, fp32 and within `statistics`."""
    assert got[0].is_contiguous()
    error = assert_close("out", got[0], expected[0], **tolerance)
    for x, right in zip(got[1:], expected[1:], strict=True):
        assert x.dtype == torch.float32
        assert_close("lse or maxima", x, right, **statistics)
    if record_error:
        record_error(error)


def assert_writes_a_part(run: Callable[..., tuple], expected: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    """run(out=part) writes the expected bits into some heads of a larger tensor, and nothing into its other heads.
    -> a larger tensor of NaN and its part"""
    *rows, heads, channels = expected[0].shape
    for around in (0, 64 - heads % 64, 3):
        whole = torch.full((*rows, heads + around, channels), NAN, dtype=expected[0].dtype, device="cuda")
        out = whole.narrow(-2, around // 2, heads)
        got = run(out=out)
        assert got[0] is out
        assert_same_bits(got, expected)
        out.fill_(NAN)
        assert whole.isnan().all()
    return whole, out
