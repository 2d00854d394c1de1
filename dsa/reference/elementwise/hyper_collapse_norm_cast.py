"""What a sublayer reads of DeepSeek-V4's hyper-connections: the streams' collapse, its RMS norm and the FP8 cast."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.elementwise.hyper_connections import MOST_ITERATIONS, hyper_collapse
from dsa.reference.elementwise.rms_norm_cast import GROUP, rms_norm_cast_to_fp8
from dsa.runtime.arguments import ALIGNED, CONTIGUOUS, F32, ROWS, Arguments, Flag, Int, Number, Tensor
from dsa.runtime.checks import check_memory

BF16 = (torch.bfloat16,)


def _check_sizes(streams: torch.Tensor) -> None:
    if streams.shape[1] == 0 or streams.shape[2] == 0 or streams.shape[2] % GROUP:
        raise ValueError(
            f"streams: must have at least one stream and D a multiple of {GROUP}, got shape {list(streams.shape)}"
        )


HYPER_COLLAPSE_NORM_CAST_TO_FP8 = Arguments(
    rule=_check_sizes,
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


@without_autocast
@torch.no_grad()
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
    """(y, q, q_scale, post, comb): x, post and comb of `hyper_collapse`, and `rms_norm_cast_to_fp8` of x. Arguments as
    of `dsa.hyper_collapse_norm_cast_to_fp8`."""
    HYPER_COLLAPSE_NORM_CAST_TO_FP8.check(
        streams, mix, base, scale, weight, iterations, eps, hc_eps, norm_eps, use_ue8m0
    )
    check_memory("streams", streams)
    x, post, comb = hyper_collapse(streams, mix, base, scale, iterations=iterations, eps=eps, hc_eps=hc_eps)
    return (*rms_norm_cast_to_fp8(x, weight, norm_eps, use_ue8m0), post, comb)
