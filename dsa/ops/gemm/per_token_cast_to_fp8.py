"""FP8 cast with one scale per token and 128 channels, optionally behind the Hadamard transform."""

import functools
from collections.abc import Callable

import torch

from dsa import backends
from dsa.ops._kernel_arguments import dtype_name
from dsa.reference.gemm import fp8_cast as reference

GROUP = 128


def per_token_cast_to_fp8(
    x: torch.Tensor, use_ue8m0: bool = True, gran_k: int = 128, *, hadamard: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """q = round_to_e4m3(x * (1 / scale)), scale = max(amax(|x|), 1e-4) / 448 over each token's groups of 128 channels.

    x          [..., K] bf16, fp16 or fp32, K a multiple of 128, last dimension contiguous
    use_ue8m0  True: scale is the next power of two at or above that figure; False: the figure itself
    gran_k     channels per scale: 128
    hadamard   True: x is first replaced, in each group of 128 channels, by H x / sqrt(128), rounded to x's dtype
               (H the Sylvester matrix), as the lightning indexer does before it quantises its queries and keys

    Returns q [..., K] float8_e4m3fn and scale [..., K / 128] float32, both contiguous; x ~ q * scale (the scale
    multiplies). NaN in a group makes its scale and values NaN; infinity makes the scale infinite. Not differentiable.
    Empty x gives empty results. Raises ValueError or TypeError for any other dtype, K, stride, gran_k or flag.
    Groups of NaN or infinity apart, the bytes are those of DeepGEMM's function on the same device; that divides by 448
    on a CPU and multiplies with 1 / 448 on a GPU, as PyTorch does, so that without ue8m0 a scale's last bit may differ
    between the two.
    On Hopper: one kernel, any number of tokens, rows with any stride that is a multiple of 16 bytes; exactly the bits
    of the reference on that GPU. CUDA-graph safe, no host synchronisation.
    Source: DeepGEMM's function of this name and `act_quant` / `rotate_activation` of DeepSeek-V3.2's inference code.
    """
    if torch.compiler.is_compiling():
        return torch.ops.dsa.per_token_cast_to_fp8(x, use_ue8m0, gran_k, hadamard)
    return _cast(x, use_ue8m0, gran_k, hadamard)


def _check(x: torch.Tensor, use_ue8m0: bool, gran_k: int, hadamard: bool) -> None:
    reference.check_per_token(x, use_ue8m0, gran_k, hadamard)
    if gran_k != GROUP:
        raise ValueError(f"gran_k: must be {GROUP}, got {gran_k}")
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"x: the last dimension must be contiguous, got strides {list(x.stride())}")


def _cast(x: torch.Tensor, use_ue8m0: bool, gran_k: int, hadamard: bool) -> tuple[torch.Tensor, torch.Tensor]:
    _check(x, use_ue8m0, gran_k, hadamard)
    if not backends.runs_kernel("per_token_cast_to_fp8", x):
        return reference.per_token_cast_to_fp8(x, use_ue8m0, gran_k, hadamard=hadamard)
    q, scale = _allocate(x)
    if x.numel():
        rows = _as_rows(x)
        launch = _kernel(x.dtype, use_ue8m0, hadamard, x.numel().bit_length())
        with backends.on_device(x):
            if x.dim() == 2:
                launch(rows, q, scale)
            else:
                launch(rows, q.view(rows.shape), scale.view(rows.shape[0], -1))
    return q, scale


@functools.cache
def _kernel(dtype: torch.dtype, use_ue8m0: bool, hadamard: bool, size_bits: int) -> Callable[..., None]:
    from dsa.kernels.gemm import per_token_cast_to_fp8_sm90 as kernels

    name = dtype_name(dtype)
    config = kernels.choose_config(name, 1 << (size_bits - 1))
    return kernels.compile_per_token_cast_to_fp8(name, use_ue8m0, hadamard, config)


def _allocate(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    return q, torch.empty((*x.shape[:-1], x.shape[-1] // GROUP), dtype=torch.float32, device=x.device)


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """x as [T, K] with one row stride, without a copy, or a ValueError."""
    try:
        rows = x if x.dim() == 2 else x.view(-1, x.shape[-1])
    except RuntimeError:
        raise ValueError(
            f"x: all dimensions before the last must be mergeable into one with a single stride, got shape "
            f"{list(x.shape)} with strides {list(x.stride())}; pass x.contiguous()"
        ) from None
    if rows.shape[0] == 1:  # a single row's stride means nothing, and may be any number
        rows = rows.as_strided(rows.shape, (rows.shape[1], 1))
    if rows.stride(0) * x.element_size() % 16 or x.data_ptr() % 16:
        raise ValueError(
            f"x: rows must start at multiples of 16 bytes, got a row stride of {rows.stride(0) * x.element_size()} "
            f"bytes and an address {x.data_ptr() % 16} bytes past a multiple"
        )
    return rows


torch.library.custom_op("dsa::per_token_cast_to_fp8", mutates_args=())(_cast)


@torch.library.register_fake("dsa::per_token_cast_to_fp8")
def _(x: torch.Tensor, use_ue8m0: bool, gran_k: int, hadamard: bool) -> tuple[torch.Tensor, torch.Tensor]:
    _check(x, use_ue8m0, gran_k, hadamard)
    return _allocate(x)
