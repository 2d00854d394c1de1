"""FP8 cast with one scale per token and 128 channels, optionally after the Hadamard transform."""

import torch

from dsa.kernels.gemm.limits import GROUP
from dsa.reference.gemm import fp8_cast as reference
from dsa.runtime.declare import FLOATS, ROWS, Arguments, Flag, Int, Tensor, dtype_name, op, rows_at_16_bytes, with_dims

__all__ = ["per_token_cast_to_fp8"]


def _check_groups(x: torch.Tensor, gran_k: int, hadamard: bool) -> None:
    if x.shape[-1] % gran_k:
        raise ValueError(f"x: the last dimension must be a multiple of gran_k={gran_k}, got {x.shape[-1]}")
    if hadamard and gran_k & (gran_k - 1):
        raise ValueError(f"gran_k: must be a power of two with hadamard, got {gran_k}")


PER_TOKEN_CAST_TO_FP8 = Arguments(
    rule=_check_groups,
    x=Tensor("... K", FLOATS, layout=ROWS, merged=(0, -1)),
    use_ue8m0=Flag(),
    gran_k=Int(),
    hadamard=Flag(),
)


def per_token_cast_to_fp8(
    x: torch.Tensor, use_ue8m0: bool = True, gran_k: int = 128, *, hadamard: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """q = round_to_e4m3(x * (1 / scale)), scale = max(amax(|x|), 1e-4) / 448 over groups of gran_k channels of a token.

    x          [..., K] bf16, fp16 or fp32, K a multiple of gran_k
    use_ue8m0  True: the scale is rounded up to a power of two; False: it is not
    gran_k     channels per scale
    hadamard   True: first replace each group of gran_k channels by H x / sqrt(gran_k), rounded to x's dtype (H the
               Sylvester matrix), as the lightning indexer does for queries and keys

    Returns q [..., K] float8_e4m3fn and scale [..., K / gran_k] float32, both contiguous; x ~ q * scale (the scale
    multiplies). NaN in a group makes its scale and values NaN; infinity makes the scale infinite. Not differentiable.
    Empty x gives empty results. Raises ValueError or TypeError for any other dtype, K, stride, gran_k or flag.
    The bytes equal those of DeepGEMM's function on the same device, except in groups with NaN or infinity. PyTorch
    divides by 448 on a CPU and multiplies by 1 / 448 on a GPU: with use_ue8m0 False the last bit of a scale can differ
    between CPU and GPU.
    On Hopper: one kernel, gran_k 128, any number of tokens, contiguous channels, rows at multiples of 16 bytes with a
    single stride between them; the same bits as the reference on this GPU. CUDA-graph safe, no host synchronisation.
    Source: DeepGEMM's function of this name and `act_quant` / `rotate_activation` of DeepSeek-V3.2's inference code.
    """
    return _per_token_cast_to_fp8(x, use_ue8m0, gran_k, hadamard)


def _results(x: torch.Tensor, gran_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    return q, torch.empty((*x.shape[:-1], x.shape[-1] // gran_k), dtype=torch.float32, device=x.device)


@op(
    arguments=PER_TOKEN_CAST_TO_FP8,
    reference=reference.per_token_cast_to_fp8,
    results=_results,
    limits={"gran_k": (GROUP,)},
)
def _per_token_cast_to_fp8(
    x: torch.Tensor, use_ue8m0: bool, gran_k: int, hadamard: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    from dsa.kernels.gemm import per_token_cast_to_fp8_sm90 as kernel

    q, scale = _results(x, gran_k)
    if x.numel():
        rows = rows_at_16_bytes(with_dims(x, 2))
        dtype = dtype_name(x.dtype)
        config = kernel.choose_config(dtype, x.numel())
        launch = kernel.compile_per_token_cast_to_fp8(dtype, use_ue8m0, hadamard, config)
        if x.dim() == 2:
            launch(rows, None, q, scale)
        else:
            launch(rows, None, q.view(rows.shape), scale.view(rows.shape[0], -1))
    return q, scale
