"""DeepSeek-V4's hyper-connections: the projection of a token's residual streams by an fp32 matrix, which is given as
the sum of three bf16 matrices."""

import torch

from dsa.kernels.elementwise.limits import (
    CHANNEL_MULTIPLE,
    MAX_MIX_OUTPUTS,
    MAX_MIX_TOKENS,
    MAX_MIX_WIDTH,
    MIX_BLOCK,
    MIX_FEW_ROWS,
    MIX_HALVES,
    MIX_OUTPUTS,
    MIX_PERSISTENT_ROWS,
    MIX_ROWS,
)
from dsa.ops.elementwise.hyper_connections import STREAMS
from dsa.reference.elementwise import hyper_mix as reference
from dsa.runtime import backends
from dsa.runtime.declare import ALIGNED, ROWS, Arguments, Tensor, at_least, at_most, multiple_of, op, rows_at_16_bytes

__all__ = ["hyper_mix"]

FEW_TOKENS = 64  # up to FEW_TOKENS tokens the kernel for few tokens is the fastest
# Upper limit on the clusters (of 8 CTAs each) in a launch, so that all run in one wave. An H200 runs up to 15 at once.
CLUSTERS = 14
BF16 = (torch.bfloat16,)


HYPER_MIX = Arguments(
    limits=STREAMS | {"C": at_least(1)},
    streams=Tensor("T n D", BF16, layout=ROWS),
    parts=Tensor("3 C n*D", BF16, layout=ALIGNED),
)
LIMITS = {
    "T": at_most(MAX_MIX_TOKENS),
    "D": multiple_of(CHANNEL_MULTIPLE),
    "n*D": at_most(MAX_MIX_WIDTH),
    "C": at_most(MAX_MIX_OUTPUTS),
}


def hyper_mix(streams: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """mix[t, c] = sum_k W[c, k] v[t, k] in fp32: the `mix` of `hyper_collapse` and `hyper_head`.

    v is the concatenation of a token's n streams. W is the sum of three bf16 matrices: high = bf16(W), middle =
    bf16(W - high), low = bf16(W - high - middle). This sum represents an fp32 number of magnitude 2^-110 to 3.39e38
    (bf16's largest number) with a relative error of at most 2^-24. The product of a number in these matrices and a bf16
    number is exact in fp32.

    streams  X [T, n, D] bf16
    parts    [3, C, n D] bf16: high, middle, low

    Returns mix [T, C] fp32, contiguous. NaN and infinities stay in their token. Differentiable: if a gradient is asked
    for, the formula runs in PyTorch.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: D a multiple of 8; n D at most 2^30; C at most 524280; T at most 2^31 - 512; rows of streams at multiples
    of 16 bytes; parts contiguous. The kernel and the reference sum in different orders, and the kernel's tensor cores
    truncate the sums. The largest measured error for n D = 16384 is 1.4e-8 of sum_k |W[c, k] v[t, k]|.
    For up to 64 tokens the kernel for few tokens runs. For more tokens a faster kernel runs if C = 24, D is a multiple
    of 64, the streams of each token are contiguous and the stride of T is above 0; for more than 1792 tokens it is
    followed by a second kernel and needs a workspace of 1.5 KB per token. Otherwise the kernel for few tokens runs,
    with the same bits.
    Deterministic; a token's result does not depend on the other tokens. CUDA-graph safe, no host synchronisation.
    Source: DeepSeek-V4's inference code; arXiv 2606.19348, section 2.2.
    """
    return _hyper_mix(streams, parts)


def _results(streams: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    return torch.empty(streams.shape[0], parts.shape[1], dtype=torch.float32, device=streams.device)


@op(
    arguments=HYPER_MIX,
    reference=reference.hyper_mix,
    results=_results,
    limits=LIMITS,
    differentiable=True,
)
def _hyper_mix(streams: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    from dsa.kernels.elementwise.hyper_mix_few_tokens_sm90 import compile_hyper_mix_few_tokens
    from dsa.kernels.elementwise.hyper_mix_sm90 import compile_hyper_mix, compile_hyper_mix_persistent

    mix = _results(streams, parts)
    tokens, n, channels = streams.shape
    if not tokens:
        return mix
    streams, parts = rows_at_16_bytes(streams), rows_at_16_bytes(parts)
    # All kernels give the same bits; the fastest one runs.
    wide = parts.shape[1] == MIX_OUTPUTS and channels % MIX_BLOCK == 0
    flat = streams.stride(0) > 0 and (n == 1 or streams.stride(1) == channels)
    if tokens <= FEW_TOKENS or not (wide and flat):
        rows = MIX_FEW_ROWS[tokens > MIX_FEW_ROWS[0]]
        compile_hyper_mix_few_tokens(rows)(streams, parts, mix)
        return mix
    streams, parts = streams.flatten(1), parts.flatten(0, 1)
    rows = next((rows for rows in MIX_ROWS if tokens <= CLUSTERS * rows), None)
    if rows is not None:
        compile_hyper_mix(rows)(streams, parts, mix)
    else:
        halves = mix.new_empty(MIX_HALVES, tokens, MIX_OUTPUTS)
        units = -(-tokens // MIX_PERSISTENT_ROWS) * MIX_HALVES
        ctas = min(backends.num_sms(mix.device), units)
        compile_hyper_mix_persistent(MIX_PERSISTENT_ROWS)(streams, parts, halves, mix, ctas)
    return mix
