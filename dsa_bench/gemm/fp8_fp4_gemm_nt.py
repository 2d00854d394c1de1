"""Grouped products of experts with FP4 weights, compared with DeepGEMM's and our grouped products of the same weights
widened to FP8."""

from functools import partial

import torch

import dsa
from dsa_bench.gemm.fp8_gemm_nt import agree_on_some
from dsa_bench.harness.case import Case, activations, copy, plain_rate
from dsa_bench.peers import deep_gemm

# tokens, columns, channels, experts, experts per token: V4-Flash's gate and up in one product, V4-Flash's down, then
# V4-Pro's gate and up, and down
SHAPES = [
    *((tokens, 4096, 4096, 256, 6) for tokens in (64, 1, 32, 128, 512, 1024, 8192)),
    *((tokens, 4096, 2048, 256, 6) for tokens in (32, 8192)),
    (64, 6144, 7168, 384, 6),
    (4096, 7168, 3072, 384, 6),
]
PROBED = [(128, 256, 512, 16, 2)]
_FP8 = "dsa, FP8"
_SHORT = 512  # up to this number of tokens a call takes about as long as its launches, so graphs are timed


def prepare() -> None:
    deep_gemm.compile_products(SHAPES)


def case(tokens: int, columns: int, channels: int, experts: int, top_k: int) -> Case:
    ends = deep_gemm.routed(tokens, experts, top_k)
    m = tokens * top_k
    a = activations(m, channels)
    packed = torch.randint(0, 256, (experts, columns, channels // 2), dtype=torch.uint8, device="cuda")
    # Scales of 2^-6 to 2^-1 as E8M0 bytes. Every weight divided by the block scale, 2^-7, is then an e4m3 number.
    exponents = torch.randint(121, 127, (experts, columns, channels // 32), dtype=torch.uint8, device="cuda")
    exponents[:, ::128, ::4] = 126  # all 128 x 128 blocks have the same largest scale, so their FP8 scales are equal
    scale = torch.full((experts, columns // 128, channels // 128), 2.0**-7, device="cuda")
    b = packed.view(torch.int8), exponents.view(torch.float8_e8m0fnu), scale
    wide = _widened(packed, exponents), scale
    size = deep_gemm.used(ends) * columns * channels * (1 / 2 + 1 / 32) + m * (channels + 2 * columns)
    rate = plain_rate(size, 2 * m * columns * channels)
    return Case(
        f"{tokens} x {columns} x {channels}, {top_k} of {experts} experts",
        {
            "dsa": [partial(dsa.grouped_fp8_fp4_gemm_nt, a, b, ends)],
            _FP8: [partial(dsa.grouped_fp8_gemm_nt, a, wide, ends)],
        },
        lambda ms: f"{rate(ms)}; {size / (ms * 1e-3) / copy():.0%} of copy",
        deep_gemm.grouped_product(a, wide, ends).renamed("{}, FP8"),
        graph=tokens <= _SHORT,
        repeats=15,
        yardsticks={_FP8},
        agree=agree_on_some,
    )


def _widened(packed: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return the FP4 weights divided by the scale of a block, 2^-7, as e4m3 [E, N, K].

    packed: e2m1 codes, two per byte [E, N, K / 2]. exponents: uint8 [E, N, K / 32]; the scale of 32 codes is
    2^(exponent - 127). One expert is widened at a time to limit memory.
    """
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=packed.device)
    pairs = torch.cat((values, -values))
    wide = packed.new_empty(*packed.shape[:2], 2 * packed.shape[2]).view(torch.float8_e4m3fn)
    for expert, (codes, powers) in enumerate(zip(packed, exponents)):
        numbers = torch.stack((pairs[(codes & 15).int()], pairs[(codes >> 4).int()]), -1).flatten(1)
        wide[expert] = (numbers.unflatten(1, (-1, 32)) * torch.exp2(powers.float() - 120)[..., None]).flatten(1)
    return wide
