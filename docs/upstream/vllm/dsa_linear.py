"""vllm/model_executor/kernels/linear/scaled_mm/dsa.py: FP8 products of block-scaled weights on Hopper."""

import torch
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.platforms import current_platform


class DsaFp8BlockScaledMMKernel(Fp8BlockScaledMMLinearKernel):
    """Before DeepGEMM in `_POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA]`, or out of tree:

    register_linear_kernel(DsaFp8BlockScaledMMKernel, PlatformEnum.CUDA, "fp8_block")
    """

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        if not current_platform.is_device_capability(90):
            return False, "The products of dsa are for Hopper."
        return True, None

    @classmethod
    def can_implement(cls, config) -> tuple[bool, str | None]:
        can, reason = super().can_implement(config)
        blocks = config.weight_quant_key.scale.group_shape == GroupShape(128, 128)
        tokens = config.activation_quant_key.scale.group_shape == GroupShape(1, 128)
        if can and not (blocks and tokens and config.out_dtype == torch.bfloat16):
            return False, "Supports bfloat16 outputs, weights in blocks of 128 x 128, and activations in groups of 128."
        return can, reason

    # The cast is part of `apply_block_scaled_mm`, whose input is then bfloat16.
    apply_input_quant = False

    def apply_block_scaled_mm(
        self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
    ) -> torch.Tensor:
        import dsa

        return dsa.fp8_gemm_nt(dsa.per_token_cast_to_fp8(A, use_ue8m0=False), (B, Bs), self.config.out_dtype)
