"""FP8 products with one matrix, compared with DeepGEMM's builds and cuBLASLt, and grouped products of experts, compared
with DeepGEMM's builds: TFLOP/s and TB/s."""

from collections.abc import Sequence
from functools import partial
from types import ModuleType

import torch

import dsa
from dsa.runtime import backends
from dsa_bench.harness.case import (
    Call,
    Case,
    Peers,
    Scaled,
    activations,
    as_reference,
    close,
    copy,
    fp8_gemm,
    some,
    weights,
)
from dsa_bench.harness.tune import Tuning, TuningClass
from dsa_bench.peers import deep_gemm
from dsa_bench.peers.package import Library

# rows, columns, channels; number of experts, and experts per row, both None for one matrix. The status table
# (docs/reference/status.md) shows the first shape.
SHAPES = [
    *((rows, 7168, 16384, None, None) for rows in (4096, 128, 1)),
    *((rows, 24576, 1536, None, None) for rows in (1, 128, 4096)),
    *((rows, 2112, 7168, None, None) for rows in (1, 128, 4096)),
    # Some other linear layers of V3.2 (`dsa bench linear_layers` times all layers of all models)
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
    # Experts of V3.2
    *((rows, 4096, 7168, 256, 8) for rows in (1, 64, 128, 4096, 8192, 16384)),
    *((rows, 7168, 2048, 256, 8) for rows in (1, 64, 128, 4096, 16384)),
    # V4-Flash
    *((rows, 4096, 4096, 256, 6) for rows in (8, 8192)),
    (1024, 4096, 2048, 256, 6),
    # V4-Pro
    (64, 6144, 7168, 384, 6),
    (4096, 7168, 3072, 384, 6),
]
FUSED = (2112, 7168)  # V3.2's q_a_proj and kv_a_proj_with_mqa, which engines join
PROBED = [(128, 2112, 1536, None, None), (1, 2112, 1536, None, None), (256, 1024, 512, 16, 2)]
SHORT = 512  # up to this number of rows a product takes microseconds, so it is timed in a CUDA graph
FRESH_BYTES, MOST_WEIGHTS = 300_000_000, 24  # a graph's matrices: bytes of all, largest number of them
CUBLAS = Library("cuBLASLt", ("torch",))


def cublas(a: Scaled, matrices: Sequence[Scaled]) -> Peers:
    def make(module: ModuleType, a: Scaled, b: Scaled) -> Call:
        columns = a[1].t().contiguous().t()
        return partial(module._scaled_mm, a[0], b[0].t(), columns, b[1].t(), out_dtype=torch.bfloat16)

    return Peers.of({CUBLAS: make}, [(a, b) for b in matrices])


def products(a: Scaled, matrices: Sequence[Scaled], builds: Sequence[Library] = deep_gemm.BUILDS) -> Peers:
    return deep_gemm.product(a, matrices, builds) | cublas(a, matrices)


def agree_on_some(theirs: torch.Tensor | tuple[torch.Tensor, torch.Tensor | None], ours: torch.Tensor) -> None:
    """Compare some rows. A peer's result is the rows, or (padded rows, indices of our rows in them), or (rows,
    None)."""
    out, rows = theirs if isinstance(theirs, tuple) else (theirs, None)
    compared = some(len(ours))
    close(out[compared] if rows is None else out[rows[compared]], ours[compared])


def prepare() -> None:
    """Compile DeepGEMM's products in parallel, because nvcc would need minutes for them one after the other."""
    deep_gemm.compile_products(shape[:3] for shape in SHAPES if shape[3] is None)
    deep_gemm.compile_products(shape for shape in SHAPES if shape[3] is not None)


def weights_like(b: Scaled, rows: int) -> list[Scaled]:
    """Return b and, for at most SHORT rows, more matrices of that size. A graph's calls read the matrices in turn, so
    that no call finds its matrix in the L2 cache.

    MOST_WEIGHTS small matrices can all fit into the cache. A graph needs several calls anyway, because one short call
    takes less time than the start of a graph.
    """
    if rows > SHORT:
        return [b]
    count = max(1, min(MOST_WEIGHTS, -(-FRESH_BYTES // b[0].numel())))
    return [b, *((b[0].view(torch.uint8).flip(0).view(b[0].dtype), b[1].clone()) for _ in range(count - 1))]


def tuning() -> Tuning:
    """Return the search space of products with one matrix: FUSED and the published models' linear layers, with the
    numbers of rows in `fp8_gemm_choice.ROWS`."""
    from dsa.kernels.gemm import fp8_gemm_choice as choice
    from dsa.kernels.gemm import fp8_gemm_few_rows_sm90 as few
    from dsa.kernels.gemm import fp8_gemm_sm90 as many
    from dsa_bench.gemm._published_layers import matrices

    sms = backends.num_sms("cuda" if torch.cuda.is_available() else "cpu")
    classes = {}
    for columns, channels in (FUSED, *matrices()):
        for rows in choice.ROWS:
            sizes = rows, columns, channels, sms
            classes[choice.shape_class(rows, columns, channels)] = TuningClass(
                partial(choice.may_win, *sizes),
                {(rows, columns, channels, None, None): ("bfloat16",)},
                choice.modelled(*sizes),
            )
    return Tuning(
        dict.fromkeys(few.CONFIGS, few.compile_fp8_gemm_few_rows)
        | dict.fromkeys(many.ONE_MATRIX_CONFIGS, many.compile_fp8_gemm),
        classes,
    )


def case(rows: int, columns: int, channels: int, experts: int | None, top_k: int | None) -> Case:
    one_matrix, name = experts is None, f"{rows} x {columns} x {channels}"
    m = rows * (top_k or 1)
    a, b = activations(m, channels), weights(*(() if one_matrix else (experts,)), columns, channels)
    if one_matrix:
        used, matrices = 1, weights_like(b, rows)
        calls, peers = [partial(dsa.fp8_gemm_nt, a, each) for each in matrices], products(a, matrices)
    else:
        ends = deep_gemm.routed(rows, experts, top_k)
        used, calls = deep_gemm.used(ends), [partial(dsa.grouped_fp8_gemm_nt, a, b, ends)]
        peers, name = deep_gemm.grouped_product(a, b, ends), f"{name}, {top_k} of {experts} experts"
    flop = 2 * m * columns * channels
    size = used * columns * channels + m * (channels + 2 * columns)

    def figure(ms: float) -> str:
        seconds = ms * 1e-3
        shares = f"{flop / seconds / fp8_gemm():.0%} of FP8 GEMM, {size / seconds / copy():.0%} of copy"
        return f"{flop / seconds / 1e12:.0f} TFLOP/s, {size / seconds / 1e12:.2f} TB/s; {shares}"

    return Case(
        name,
        {"dsa": calls},
        figure,
        peers,
        graph=rows <= SHORT,
        repeats=15,
        agree=agree_on_some,
        check=as_reference(calls[0], 1e-5),
    )
