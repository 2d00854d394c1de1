"""vllm/model_executor/layers/fused_moe/experts/dsa_moe.py: routed experts of FP8 weights on Hopper."""

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    QuantKey,
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
)
from vllm.platforms import current_platform


class DsaExperts(mk.FusedMoEExpertsModular):
    """`Fp8MoeBackend.DSA` in oracle/fp8.py, before TRITON on Hopper. The weights stay as they are in the checkpoint."""

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True  # the cast also sorts tokens by expert

    @staticmethod
    def _supports_current_device() -> bool:
        return current_platform.is_device_capability(90)

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool:
        return (weight_key, activation_key) == (kFp8Static128BlockSym, kFp8Dynamic128Sym)

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation == MoEActivation.SILU

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return not moe_parallel_config.use_all2all_kernels

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation):
        return (1,), (1,), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        import dsa

        experts = topk_ids if expert_map is None else expert_map[topk_ids.long()]  # -1: of another rank
        _, rows, ends = dsa.sort_by_expert(experts, len(w1))
        cast = dsa.scatter_cast_to_fp8(hidden_states, rows, use_ue8m0=False)
        limit = self.quant_config.gemm1_clamp_limit
        h = dsa.grouped_fp8_gemm_swiglu(cast, (w1, self.w1_scale), ends, limit=limit, use_ue8m0=False)
        y = dsa.grouped_fp8_gemm_nt(h, (w2, self.w2_scale), ends, output.dtype)
        output.copy_(dsa.combine_experts(y, rows, topk_weights))
