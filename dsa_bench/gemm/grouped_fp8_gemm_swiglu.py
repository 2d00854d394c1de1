"""Gate and up products of experts with a fused gather of rows, SwiGLU and cast. They are compared with DeepGEMM's
product of rows gathered outside the timing, followed by our SwiGLU with cast, and with three separate steps: a gather
in torch, our product, and our SwiGLU with cast."""

from functools import partial

import torch

import dsa
from dsa_bench.harness.case import Case, Scaled, activations, agree, plain_rate, some
from dsa_bench.peers import deep_gemm

# tokens, inner channels (half of the product's columns), channels, experts, experts per token, limit of SwiGLU or None
SHAPES = [
    *((tokens, 2048, 7168, 256, 8, None) for tokens in (4096, 1, 64, 1024, 8192, 16384)),
    *((tokens, 2048, 4096, 256, 6, 10.0) for tokens in (64, 8192)),
    (4096, 3072, 7168, 384, 6, 10.0),
]
PROBED = [(128, 256, 512, 16, 2, None), (256, 256, 512, 16, 2, 10.0)]
_THREE = "dsa, three kernels"
_SHORT = 512  # up to this number of tokens a call takes about as long as its launches, so graphs are timed


def prepare() -> None:
    deep_gemm.compile_products(
        (tokens, 2 * inner, channels, experts, top_k) for tokens, inner, channels, experts, top_k, _ in SHAPES
    )


def case(tokens: int, inner: int, channels: int, experts: int, top_k: int, limit: float | None) -> Case:
    chosen = torch.rand(tokens, experts, device="cuda").argsort(-1)[:, :top_k]
    order, _, ends = dsa.sort_by_expert(chosen, experts)
    rows = (order // top_k).to(torch.int32)
    q, s = activations(tokens, channels)
    # Random bytes with any sign and mantissa and a magnitude from 1/4 to below 1. Gaussian numbers for all experts take
    # long to generate.
    w = torch.randint(0, 32, (experts, 2 * inner, channels), dtype=torch.uint8, device="cuda")
    w.add_(w & 0x10, alpha=7).add_(0x28)
    b = (
        w.view(torch.float8_e4m3fn),
        torch.full((experts, 2 * inner // 128, channels // 128), channels**-0.5, device="cuda"),
    )

    def gathered() -> Scaled:
        return q.view(torch.uint8)[rows].view(q.dtype), s[rows]

    def cast(gate_up: torch.Tensor) -> Scaled:
        return dsa.swiglu_cast_to_fp8(*gate_up.chunk(2, -1), limit=limit)

    fused = partial(dsa.grouped_fp8_gemm_swiglu, (q, s), b, ends, rows=rows, limit=limit)
    size = deep_gemm.used(ends) * 2 * inner * channels + tokens * channels + len(rows) * inner
    bound = "" if limit is None else f", limit {limit:g}"
    return Case(
        f"{tokens} x {2 * inner} x {channels}, {top_k} of {experts} experts{bound}",
        {"dsa": [fused], _THREE: [lambda: cast(dsa.grouped_fp8_gemm_nt(gathered(), b, ends))]},
        plain_rate(size, 2 * len(rows) * 2 * inner * channels),
        # DeepGEMM's result has padding between the experts' rows, so the cast of its result also casts the padding.
        deep_gemm.grouped_product(gathered(), b, ends)
        .renamed("{}, our cast")
        .then(lambda product: (*cast(product[0]), product[1])),
        graph=tokens <= _SHORT,
        repeats=15,
        yardsticks={_THREE},
        agree=_agree,
    )


def _agree(theirs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], ours: Scaled) -> None:
    """Compare some rows. The peer's third tensor has the indices of our rows among the padded rows."""
    q, scale, places = theirs
    rows = some(len(ours[0]))
    values = q.view(torch.uint8)[places[rows]].view(q.dtype)  # torch cannot gather rows of e4m3
    agree((values, scale[places[rows]]), (ours[0][rows], ours[1][rows]))
