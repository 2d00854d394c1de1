"""Gate and up products of experts that end in SwiGLU and the cast, compared with DeepGEMM's product and our cast, and
with our three kernels one after the other."""

from functools import partial

import torch

import dsa
from dsa_bench.harness.agreement import agree, some
from dsa_bench.harness.case import Case, plain_rate
from dsa_bench.peers import deep_gemm

# tokens, inner channels (half of the product's columns), channels, experts, how many a token goes to, limit
SHAPES = [
    *((tokens, 2048, 7168, 256, 8, None) for tokens in (4096, 1, 64, 1024, 8192, 16384)),
    *((tokens, 2048, 4096, 256, 6, 10.0) for tokens in (64, 8192)),
    (4096, 3072, 7168, 384, 6, 10.0),
]
PROBED = [(128, 256, 512, 16, 2, None), (256, 256, 512, 16, 2, 10.0)]
_THREE = "dsa, three kernels"
_SHORT = 512  # tokens up to which a call takes microseconds a launch


def prepare() -> None:
    deep_gemm.compile_grouped_products(
        (tokens, 2 * inner, channels, experts, top_k) for tokens, inner, channels, experts, top_k, _ in SHAPES
    )


def case(tokens: int, inner: int, channels: int, experts: int, top_k: int, limit: float | None) -> Case:
    blocks = channels // 128
    chosen = torch.rand(tokens, experts, device="cuda").argsort(-1)[:, :top_k]
    order, _, ends = dsa.sort_by_expert(chosen, experts)
    rows = (order // top_k).to(torch.int32)
    q = torch.randn(tokens, channels, device="cuda").to(torch.float8_e4m3fn)
    s = torch.rand(tokens, blocks, device="cuda") + 0.5
    # Any sign, exponents for 1/4 to 1, any fraction: as many numbers as these take long to draw.
    w = torch.randint(0, 32, (experts, 2 * inner, channels), dtype=torch.uint8, device="cuda")
    w.add_(w & 0x10, alpha=7).add_(0x28)
    b = w.view(torch.float8_e4m3fn), torch.full((experts, 2 * inner // 128, blocks), channels**-0.5, device="cuda")

    def gathered() -> deep_gemm.Scaled:
        return q.view(torch.uint8)[rows].view(q.dtype), s[rows]

    def separate() -> tuple[torch.Tensor, torch.Tensor]:
        return _cast(dsa.grouped_fp8_gemm_nt(gathered(), b, ends))

    def _cast(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return dsa.swiglu_cast_to_fp8(*gate_up.chunk(2, -1), limit=limit)

    def with_cast(product: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        out, places = product
        return *_cast(out), places

    calls = {
        "dsa": [partial(dsa.grouped_fp8_gemm_swiglu, (q, s), b, ends, rows=rows, limit=limit)],
        _THREE: [separate],
    }
    # DeepGEMM gets the experts' rows, with padding, which is cast too.
    peers = deep_gemm.grouped_product(gathered(), b, ends).renamed("{}, our cast").then(with_cast)
    flop = 2 * len(rows) * 2 * inner * channels
    size = deep_gemm.used(ends) * 2 * inner * channels + tokens * channels + len(rows) * inner

    bound = "" if limit is None else f", limit {limit:g}"
    name = f"{tokens} x {2 * inner} x {channels}, {top_k} of {experts} experts{bound}"
    figure, others = plain_rate(size, flop), {"yardsticks": frozenset({_THREE}), "agree": _agree}
    return Case(name, calls, figure, peers, graph=tokens <= _SHORT, repeats=15, **others)


def _agree(theirs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], ours: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Theirs has padding between the rows: the third tensor is where our rows are."""
    q, scale, places = theirs
    rows = some(len(ours[0]))
    values = q.view(torch.uint8)[places[rows]].view(q.dtype)  # rows of e4m3 cannot be gathered
    agree((values, scale[places[rows]]), (ours[0][rows], ours[1][rows]))
