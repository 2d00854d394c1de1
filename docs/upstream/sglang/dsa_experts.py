"""sglang/srt/layers/moe/moe_runner/dsa.py: routed experts of FP8 weights on Hopper."""

from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore, MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.runner import register_moe_runner_core
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.moe.utils import MoeRunnerBackendLike, resolve_moe_runner_backend


class DsaExperts(DispatchMoeRunnerCore):
    """`--moe-runner-backend dsa`. The weights stay as they are in the checkpoint, in Triton's `quant_info`."""

    @property
    def runner_backend(self) -> MoeRunnerBackendLike:
        return resolve_moe_runner_backend("dsa")

    def run_from_dispatch(
        self,
        dispatch_output: StandardDispatchOutput,
        quant_info: TritonMoeQuantInfo,
        runner_config: MoeRunnerConfig,
        hooks: object = None,
    ) -> StandardCombineInput:
        import dsa

        x, (weights, experts, _) = dispatch_output.hidden_states, dispatch_output.topk_output
        gate_up, down = (quant_info.w13_weight, quant_info.w13_scale), (quant_info.w2_weight, quant_info.w2_scale)
        _, rows, ends = dsa.sort_by_expert(experts, len(quant_info.w13_weight))  # -1: of another rank
        cast = dsa.scatter_cast_to_fp8(x, rows, use_ue8m0=False)
        h = dsa.grouped_fp8_gemm_swiglu(cast, gate_up, ends, limit=runner_config.swiglu_limit, use_ue8m0=False)
        y = dsa.grouped_fp8_gemm_nt(h, down, ends, x.dtype)
        factor = runner_config.routed_scaling_factor or 1.0
        return StandardCombineInput(dsa.combine_experts(y, rows, weights.float() * factor))


register_moe_runner_core("dsa", DsaExperts)
