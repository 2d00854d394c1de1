"""Index scores over contiguous keys: TFLOP/s on the pairs in range, beside DeepGEMM and cuDNN-frontend."""

from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

import dsa
from dsa.testing import calc_diff, fp8_gemm_rate
from dsa_bench.harness.case import Call, Case

if TYPE_CHECKING:
    from dsa_bench.harness.tune import Tuning

# queries, keys, heads, head dimension; causal
SHAPES = [
    (4096, 32768, 64, 128),
    (2048, 8192, 64, 128),
    (4096, 131072, 64, 128),
    (8192, 65536, 32, 128),
    (4096, 8192, 32, 64),
]
_ceiling = cache(fp8_gemm_rate)


def _peers(
    q: torch.Tensor, kv: Any, weights: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor
) -> dict[str, Call]:
    peers: dict[str, Call] = {}
    try:
        import deep_gemm

        peers["deepgemm"] = partial(deep_gemm.fp8_mqa_logits, q, kv, weights, starts, ends, clean_logits=True)
    except ImportError:
        pass
    try:
        from cudnn import DSA
    except ImportError:
        return peers
    queries, heads, _ = q.shape
    offset = torch.full((1,), len(kv[0]) - queries, dtype=torch.int32, device="cuda")
    # It takes the queries' scales apart; its keys are causal from `offset` on.
    call = partial(
        DSA.indexer_forward_wrapper,
        q[None],
        kv[0][None, :, None],
        weights[None],
        ratio=1,
        qhead_per_kv_head=heads,
        precision="fp8",
        q_scale=torch.ones(1, queries, heads, device="cuda"),
        k_scale=kv[1][None, :, None],
        q_causal_offsets=offset,
    )
    try:
        call()
        peers["cudnn-frontend"] = call
    except Exception:  # it takes some shapes only, and says so in as many ways
        pass
    return peers


def case(queries: int, keys: int, heads: int, dim: int) -> Case:
    q = torch.randn(queries, heads, dim, device="cuda").to(torch.float8_e4m3fn)
    kv = torch.randn(keys, dim, device="cuda").to(torch.float8_e4m3fn), torch.rand(keys, device="cuda") + 0.5
    weights = torch.randn(queries, heads, device="cuda")
    starts = torch.zeros(queries, dtype=torch.int32, device="cuda")
    ends = torch.arange(queries, dtype=torch.int32, device="cuda") + keys - queries
    arguments = (q, kv, weights, starts, ends)
    flop = 2 * int((ends - starts).sum()) * heads * dim

    def figure(ms: float) -> str:
        rate = flop / (ms * 1e-3)
        return f"{rate / 1e12:.0f} TFLOP/s, {rate / _ceiling():.0%} of FP8 GEMM"

    def check(got: torch.Tensor) -> None:
        with dsa.use_backend("reference"):
            expected = dsa.fp8_mqa_logits(*arguments)
        if not (diff := calc_diff(got, expected)) < 5e-6:
            raise AssertionError(f"calc_diff {diff:.2g}")

    calls = {"dsa": [partial(dsa.fp8_mqa_logits, *arguments)]}
    calls |= {name: [call] for name, call in _peers(*arguments).items()}
    return Case(f"{queries} x {keys}, H {heads}, D {dim}, causal, cleaned", calls, figure, check, repeats=15)


def tuning() -> "Tuning":
    from dsa.kernels import fp8_mqa_logits_sm90 as kernels
    from dsa_bench.harness.tune import Tuning, TuningClass

    sizes = {
        64: [(2048, 8192), (4096, 32768)],
        32: [(4096, 8192), (4096, 32768)],
        16: [(8192, 8192)],
        8: [(8192, 8192)],
    }
    return Tuning(
        kernels.MqaLogitsConfig,
        kernels.compile_fp8_mqa_logits,
        {
            f"heads {heads}, dim {dim}": TuningClass(
                lambda config, heads=heads: config.fits(heads),
                {(*size, heads, dim): (heads, dim, "float32", True, False) for size in sizes[heads]},
            )
            for heads in sizes
            for dim in (128, 64, 32)
        },
    )
