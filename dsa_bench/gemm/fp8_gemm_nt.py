"""FP8 products: TFLOP/s and bytes, one matrix and the experts of a mixture, compared with DeepGEMM's builds and
cuBLASLt."""

from collections.abc import Sequence
from functools import partial
from types import ModuleType

import torch

import dsa
from dsa.runtime import backends
from dsa.testing import calc_diff
from dsa_bench.harness import agreement
from dsa_bench.harness.calls import Call, Peers
from dsa_bench.harness.case import Case, copy, fp8_gemm
from dsa_bench.harness.tune import Tuning, TuningClass
from dsa_bench.peers import deep_gemm
from dsa_bench.peers.package import Library

# rows, columns, channels; experts and how many of them a row goes to, or None
# The first is the one that the status table shows.
SHAPES = [
    *((rows, 7168, 16384, None, None) for rows in (4096, 128, 1)),
    *((rows, 24576, 1536, None, None) for rows in (1, 128, 4096)),
    *((rows, 2112, 7168, None, None) for rows in (1, 128, 4096)),
    # Of the other linear layers, `dsa bench linear_layers`, each at some number of rows: of V3.2
    *((rows, 1536, 7168, None, None) for rows in (1, 64)),
    *((rows, 576, 7168, None, None) for rows in (2, 8192)),
    (16, 128, 7168, None, None),
    (32, 8192, 1536, None, None),
    *((rows, 18432, 7168, None, None) for rows in (8, 16384)),
    (256, 7168, 18432, None, None),
    *((rows, 7168, 2048, None, None) for rows in (4, 8192)),
    (512, 2048, 7168, None, None),
    (1024, 32768, 512, None, None),
    # GLM-5
    *((rows, 16384, 2048, None, None) for rows in (1, 4096)),
    *((rows, 6144, 16384, None, None) for rows in (16, 8192)),
    (2, 2048, 6144, None, None),
    (64, 12288, 6144, None, None),
    (1024, 6144, 12288, None, None),
    # V4-Flash
    *((rows, 32768, 1024, None, None) for rows in (1, 512, 16384)),
    *((rows, 4096, 8192, None, None) for rows in (8, 256, 8192)),
    (4, 512, 4096, None, None),
    (32, 1024, 4096, None, None),
    (128, 4096, 2048, None, None),
    # V4-Pro
    *((rows, 65536, 1536, None, None) for rows in (1, 64, 4096)),
    (16, 512, 7168, None, None),
    (1024, 3072, 7168, None, None),
    # The experts of V3.2
    *((rows, 4096, 7168, 256, 8) for rows in (1, 64, 128, 4096, 8192, 16384)),
    *((rows, 7168, 2048, 256, 8) for rows in (1, 64, 128, 4096, 16384)),
    # V4-Flash
    *((rows, 4096, 4096, 256, 6) for rows in (8, 8192)),
    (1024, 4096, 2048, 256, 6),
    # V4-Pro
    (64, 6144, 7168, 384, 6),
    (4096, 7168, 3072, 384, 6),
]
FUSED = (2112, 7168)  # V3.2's q_a_proj and kv_a_proj_with_mqa as one matrix, which engines make of them
PROBED = [(128, 2112, 1536, None, None), (1, 2112, 1536, None, None), (256, 1024, 512, 16, 2)]
SHORT = 512  # rows up to which a product takes microseconds
FRESH_BYTES, MOST_WEIGHTS = 300_000_000, 24  # of weights in a graph: more than the L2 cache holds
CUBLAS = Library("cuBLASLt", ("torch",))


def cublas(a: deep_gemm.Scaled, weights: Sequence[deep_gemm.Scaled]) -> Peers:
    """torch's block-scaled product with each of the weights, where this build of it has one."""

    def make(module: ModuleType, a: deep_gemm.Scaled, b: deep_gemm.Scaled) -> Call:
        columns = a[1].t().contiguous().t()
        return partial(module._scaled_mm, a[0], b[0].t(), columns, b[1].t(), out_dtype=torch.bfloat16)

    return Peers.of({CUBLAS: make}, [(a, b) for b in weights])


def agree_on_some(got: torch.Tensor | tuple[torch.Tensor, torch.Tensor | None], ours: torch.Tensor) -> None:
    """A peer's result may be (rows between padding, where ours are)."""
    out, rows = got if isinstance(got, tuple) else (got, None)
    some = agreement.some(len(ours))
    agreement.close(out[some] if rows is None else out[rows[some]], ours[some])


def prepare() -> None:
    """One product after the other, DeepGEMM's would keep nvcc busy for minutes."""
    deep_gemm.compile_products(shape[:3] for shape in SHAPES if shape[3] is None)
    deep_gemm.compile_grouped_products(shape for shape in SHAPES if shape[3] is not None)


def weights_like(b: deep_gemm.Scaled, rows: int) -> list[deep_gemm.Scaled]:
    """b, and for few rows, whose calls are shorter than a graph's start, others of its size: so many that none is in
    the L2 cache when its turn comes, but for weights of which MOST_WEIGHTS fit into it."""
    if rows > SHORT:
        return [b]
    count = max(1, min(MOST_WEIGHTS, -(-FRESH_BYTES // b[0].numel())))
    return [b, *((b[0].view(torch.uint8).flip(0).view(b[0].dtype), b[1].clone()) for _ in range(count - 1))]


def tuning() -> Tuning:
    """Search products with one matrix: the published models' linear layers, at the numbers of rows that data is for."""
    from dsa.kernels.gemm import fp8_gemm_choice as choice
    from dsa.kernels.gemm import fp8_gemm_few_rows_sm90 as few
    from dsa.kernels.gemm import fp8_gemm_sm90 as many
    from dsa_bench.gemm._published_layers import matrices

    multiprocessors = backends.num_sms("cuda" if torch.cuda.is_available() else "cpu")
    classes = {}
    for columns, channels in (FUSED, *matrices()):
        for rows in choice.ROWS:
            sizes = rows, columns, channels, multiprocessors
            classes[choice.shape_class(rows, columns, channels)] = TuningClass(
                partial(choice.may_win, *sizes),
                {(rows, columns, channels, None, None): ("bfloat16",)},
                choice.modelled(*sizes),
            )
    candidates = dict.fromkeys(few.CONFIGS, few.compile_fp8_gemm_few_rows)
    return Tuning(candidates | dict.fromkeys(many.ONE_MATRIX_CONFIGS, many.compile_fp8_gemm), classes)


def case(rows: int, columns: int, channels: int, experts: int | None, top_k: int | None) -> Case:
    lead = () if experts is None else (experts,)
    ends = None if experts is None else deep_gemm.routed(rows, experts, top_k)
    m = rows * (top_k or 1)
    blocks = channels // 128
    a = torch.randn(m, channels, device="cuda").to(torch.float8_e4m3fn), torch.rand(m, blocks, device="cuda") + 0.5
    # Bytes at random, but no NaN: as many numbers as these take long to draw.
    w = torch.randint(0, 127, (*lead, columns, channels), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    b = w, torch.rand(*lead, -(-columns // 128), blocks, device="cuda") + 0.5
    used = 1 if ends is None else deep_gemm.used(ends)
    flop = 2 * m * columns * channels
    size = used * columns * channels + m * (channels + 2 * columns)

    def figure(ms: float) -> str:
        seconds = ms * 1e-3
        shares = f"{flop / seconds / fp8_gemm():.0%} of FP8 GEMM, {size / seconds / copy():.0%} of copy"
        return f"{flop / seconds / 1e12:.0f} TFLOP/s, {size / seconds / 1e12:.2f} TB/s; {shares}"

    arguments = (a, b) if ends is None else (a, b, ends)
    product = dsa.fp8_gemm_nt if ends is None else dsa.grouped_fp8_gemm_nt

    def check(got: torch.Tensor) -> None:
        with dsa.use_backend("reference"):
            expected = product(*arguments)
        if not (diff := calc_diff(got, expected)) < 1e-5:
            raise AssertionError(f"calc_diff {diff:.2g}")

    if ends is None:
        weights = weights_like(b, rows)
        peers = deep_gemm.product(a, weights) | cublas(a, weights)
        calls = {"dsa": [partial(product, a, other) for other in weights]}
    else:
        peers, calls = deep_gemm.grouped_product(a, b, ends), {"dsa": [partial(product, *arguments)]}
    name = f"{rows} x {columns} x {channels}" + ("" if experts is None else f", {top_k} of {experts} experts")
    others = {"agree": agree_on_some, "check": check}
    return Case(name, calls, figure, peers, graph=rows <= SHORT, repeats=15, **others)
