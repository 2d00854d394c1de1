"""FP8 cast that writes each token to the rows of its experts, so that no second kernel sorts the cast values by
expert."""

import torch

from dsa.kernels.gemm.limits import GROUP
from dsa.reference.gemm import scatter_cast_to_fp8 as reference
from dsa.runtime.declare import (
    FLOATS,
    INT32,
    ROWS,
    Arguments,
    Flag,
    Tensor,
    dtype_name,
    multiple_of,
    op,
    rows_at_16_bytes,
)

__all__ = ["scatter_cast_to_fp8"]


SCATTER_CAST_TO_FP8 = Arguments(
    limits={"K": multiple_of(GROUP)},
    x=Tensor("T K", FLOATS, layout=ROWS),
    places=Tensor("T k", INT32),
    use_ue8m0=Flag(),
)


def scatter_cast_to_fp8(
    x: torch.Tensor, places: torch.Tensor, use_ue8m0: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """`per_token_cast_to_fp8(x, use_ue8m0)`; each token is cast once and stored k times, for its experts.

    x          [T, K] bf16, fp16 or fp32, K a multiple of 128
    places     int32 [T, k]: token t goes to the rows places[t, 0] to places[t, k - 1] of the results; numbers outside
               [0, T * k) are ignored. The result `rows` of `sort_by_expert` can be passed as `places`
    use_ue8m0  True: a scale is max(amax(|x|), 1e-4) / 448, rounded up to a power of two; False: it is not rounded up

    Returns q [T * k, K] float8_e4m3fn and scale [T * k, K / 128] float32, both contiguous: the activations of
    `grouped_fp8_gemm_swiglu`. The kernel leaves rows without a token undefined; the reference makes them 0, with scales
    of 1. If several tokens go to one row, one of them is stored. Not differentiable. Without tokens or channels the
    results are empty.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: one kernel, contiguous channels, rows at multiples of 16 bytes; the same bits as `per_token_cast_to_fp8`
    on the same GPU. CUDA-graph safe, no host synchronisation.
    """
    return _scatter_cast_to_fp8(x, places, use_ue8m0)


def _results(x: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, channels = places.numel(), x.shape[1]
    q = torch.empty((rows, channels), dtype=torch.float8_e4m3fn, device=x.device)
    return q, torch.empty((rows, channels // GROUP), dtype=torch.float32, device=x.device)


@op(
    arguments=SCATTER_CAST_TO_FP8,
    reference=reference.scatter_cast_to_fp8,
    results=_results,
)
def _scatter_cast_to_fp8(x: torch.Tensor, places: torch.Tensor, use_ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    from dsa.kernels.gemm import per_token_cast_to_fp8_sm90 as kernel

    q, scale = _results(x, places)
    if q.numel():
        dtype = dtype_name(x.dtype)
        config = kernel.choose_config(dtype, x.numel())
        launch = kernel.compile_per_token_cast_to_fp8(dtype, use_ue8m0, False, config, True)
        launch(rows_at_16_bytes(x), places.contiguous(), q, scale)
    return q, scale
