"""Hyper-connections before a sublayer: collapse of the streams, RMS norm and FP8 cast in one op."""

from collections.abc import Sequence

import torch

from dsa.kernels.elementwise.limits import (
    HYPER_NORM_TILES,
    HYPER_STREAMS,
    INDEPENDENT_NORM_TILES,
    MAX_HYPER_CHANNELS,
)
from dsa.kernels.gemm.limits import GROUP
from dsa.ops.elementwise.hyper_connections import MOST_ITERATIONS
from dsa.ops.elementwise.hyper_mix import BF16
from dsa.ops.gemm._operands import scale_columns
from dsa.reference.elementwise import hyper_collapse_norm_cast as reference
from dsa.runtime.declare import (
    ALIGNED,
    CONTIGUOUS,
    F32,
    ROWS,
    Arguments,
    Flag,
    Int,
    Number,
    Tensor,
    at_least,
    at_most,
    multiple_of,
    op,
    rows_at_16_bytes,
)

__all__ = ["hyper_collapse_independent_norm_cast_to_fp8", "hyper_collapse_norm_cast_to_fp8"]

_VECTOR = 8  # bf16 channels in 16 bytes
MAX_CHANNELS = HYPER_NORM_TILES[-1][1] * HYPER_NORM_TILES[-1][2] * _VECTOR


HYPER_COLLAPSE_NORM_CAST_TO_FP8 = Arguments(
    limits={"n": at_least(1), "D": multiple_of(GROUP, least=GROUP)},
    streams=Tensor("T n D", BF16, layout=ROWS),
    mix=Tensor("T (2+n)*n", F32, layout=ALIGNED),
    base=Tensor("(2+n)*n", F32, layout=ALIGNED),
    scale=Tensor("3", F32, layout=CONTIGUOUS),
    weight=Tensor("D", F32, layout=ROWS),
    iterations=Int(most=MOST_ITERATIONS),
    eps=Number(least=0),
    hc_eps=Number(least=0),
    norm_eps=Number(least=0),
    use_ue8m0=Flag(),
)
HYPER_COLLAPSE_INDEPENDENT_NORM_CAST_TO_FP8 = Arguments(
    limits=HYPER_COLLAPSE_NORM_CAST_TO_FP8.limits,
    streams=Tensor("T n D", BF16, layout=ROWS),
    mix=Tensor("T 2*n", F32, layout=ALIGNED),
    base=Tensor("2*n", F32, layout=ALIGNED),
    scale=Tensor("2", F32, layout=CONTIGUOUS),
    weight=Tensor("D", F32, layout=ROWS),
    magnitude=Number(),
    eps=Number(least=0),
    hc_eps=Number(least=0),
    norm_eps=Number(least=0),
    use_ue8m0=Flag(),
    pad_scales=Flag(),
)
LIMITS = {"n": (HYPER_STREAMS,), "D": at_most(MAX_CHANNELS), "T*D": at_most(MAX_HYPER_CHANNELS)}


def hyper_collapse_norm_cast_to_fp8(
    streams: torch.Tensor,
    mix: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    *,
    iterations: int = 20,
    eps: float = 1e-6,
    hc_eps: float = 1e-6,
    norm_eps: float = 1e-6,
    use_ue8m0: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, post, comb = hyper_collapse(streams, ...), and then y, q, q_scale = rms_norm_cast_to_fp8(x, weight, ...).

    streams  X [T, n, D] bf16, D a multiple of 128
    mix, base, scale, iterations, eps, hc_eps  see `dsa.hyper_collapse`
    weight   [D] fp32
    norm_eps, use_ue8m0  eps and use_ue8m0 of `dsa.rms_norm_cast_to_fp8`

    Returns (y [T, D] bf16, q [T, D] float8_e4m3fn, q_scale [T, D / 128], post [T, n], comb [T, n, n] fp32), contiguous,
    bit-identical to the results of the two functions. x is not returned, because a sublayer reads only y and q.
    `hyper_expand` takes post and comb. Not differentiable. Raises TypeError or ValueError for other types, dtypes,
    shapes, strides and devices.
    On Hopper: one kernel. n = 4; D at most 8192; T D at most 2^33 - 2^13; rows of streams at multiples of 16 bytes; the
    other tensors contiguous. Deterministic; a token's results do not depend on the other tokens. CUDA-graph safe, no
    host synchronisation, no workspace.
    Source: see `dsa.hyper_collapse` and `dsa.rms_norm_cast_to_fp8`.
    """
    return _hyper_collapse_norm_cast_to_fp8(
        streams, mix, base, scale, weight, iterations, eps, hc_eps, norm_eps, use_ue8m0
    )


def hyper_collapse_independent_norm_cast_to_fp8(
    streams: torch.Tensor,
    mix: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    *,
    magnitude: float = 2.0,
    eps: float = 1e-6,
    hc_eps: float = 1e-6,
    norm_eps: float = 1e-6,
    use_ue8m0: bool = True,
    pad_scales: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, post = hyper_collapse_independent(streams, ...), and then y, q, q_scale = rms_norm_cast_to_fp8(x, ...).

    streams  X [T, n, D] bf16, D a multiple of 128
    mix, base, scale, magnitude, eps, hc_eps  see `dsa.hyper_collapse_independent`
    weight   [D] fp32
    norm_eps, use_ue8m0  eps and use_ue8m0 of `dsa.rms_norm_cast_to_fp8`
    pad_scales  True: q_scale has 4 ceil(D / 512) columns, of which the added ones are those of zeros. `dsa.fp8_gemm_nt`
                reads such scales without a copy

    Returns (y [T, D] bf16, q [T, D] float8_e4m3fn, q_scale [T, D / 128], post [T, n] fp32), contiguous, bit-identical
    to the results of the two functions. Otherwise as `dsa.hyper_collapse_norm_cast_to_fp8`, also on Hopper.
    Source: see `dsa.hyper_collapse_independent` and `dsa.rms_norm_cast_to_fp8`.
    """
    return _hyper_collapse_independent_norm_cast_to_fp8(
        streams, mix, base, scale, weight, magnitude, eps, hc_eps, norm_eps, use_ue8m0, pad_scales
    )


def _independent_results(
    streams: torch.Tensor, pad_scales: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, n, channels = streams.shape
    y = torch.empty(tokens, channels, dtype=streams.dtype, device=streams.device)
    q = torch.empty(tokens, channels, dtype=torch.float8_e4m3fn, device=streams.device)
    sizes = scale_columns(channels, pad_scales), n
    return y, q, *(torch.empty(tokens, size, dtype=torch.float32, device=streams.device) for size in sizes)


def _results(streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, n, _ = streams.shape
    return *_independent_results(streams, False), torch.empty(tokens, n, n, dtype=torch.float32, device=streams.device)


@op(
    arguments=HYPER_COLLAPSE_NORM_CAST_TO_FP8,
    reference=reference.hyper_collapse_norm_cast_to_fp8,
    results=_results,
    limits=LIMITS,
)
def _hyper_collapse_norm_cast_to_fp8(
    streams: torch.Tensor,
    mix: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    iterations: int,
    eps: float,
    hc_eps: float,
    norm_eps: float,
    use_ue8m0: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    from dsa.kernels.elementwise.hyper_collapse_norm_cast_sm90 import compile_hyper_collapse_norm_cast

    y, q, q_scale, post, comb = _results(streams)
    if len(streams):
        rows, mix, base = (rows_at_16_bytes(t) for t in (streams, mix, base))
        launch = compile_hyper_collapse_norm_cast(*_tile(HYPER_NORM_TILES, streams.shape[2]), use_ue8m0)
        given = rows, mix, base, scale, weight
        launch(
            *(*given, y, q, q_scale, post, comb.flatten(1)),
            *(iterations, float(eps), float(hc_eps), float(norm_eps), None),
        )
    return y, q, q_scale, post, comb


@op(
    arguments=HYPER_COLLAPSE_INDEPENDENT_NORM_CAST_TO_FP8,
    reference=reference.hyper_collapse_independent_norm_cast_to_fp8,
    results=_independent_results,
    limits=LIMITS,
)
def _hyper_collapse_independent_norm_cast_to_fp8(
    streams: torch.Tensor,
    mix: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    magnitude: float,
    eps: float,
    hc_eps: float,
    norm_eps: float,
    use_ue8m0: bool,
    pad_scales: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    from dsa.kernels.elementwise.hyper_collapse_norm_cast_sm90 import compile_hyper_collapse_independent_norm_cast

    results = _independent_results(streams, pad_scales)
    if len(streams):
        rows, mix, base = (rows_at_16_bytes(t) for t in (streams, mix, base))
        tile = _tile(INDEPENDENT_NORM_TILES, streams.shape[2])
        launch = compile_hyper_collapse_independent_norm_cast(*tile, use_ue8m0)
        numbers = float(eps), float(hc_eps), float(norm_eps), float(magnitude)
        launch(rows, mix, base, scale, weight, *results, None, None, *numbers)
    return results


def _tile(tiles: Sequence[tuple[int, int, int]], channels: int) -> tuple[int, int, int]:
    return next(tile for tile in tiles if channels <= tile[1] * tile[2] * _VECTOR)
