"""Addition to sglang/srt/layers/quantization/fp8_utils.py: FP8 linear layers on Hopper."""

import torch


def dsa_w8a8_block_fp8_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    block_size: list[int],
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    act_scale_ue8m0: bool = False,
) -> torch.Tensor:
    """`Fp8GemmRunnerBackend.DSA`, for blocks of 128 x 128."""
    import dsa

    rows = input.view(-1, input.shape[-1])
    cast = dsa.per_token_cast_to_fp8(rows, act_scale_ue8m0) if input_scale is None else (rows, input_scale)
    dtype = input.dtype if input_scale is None else torch.bfloat16
    output = dsa.fp8_gemm_nt(cast, (weight, weight_scale), dtype).view(*input.shape[:-1], len(weight))
    return output if bias is None else output + bias
