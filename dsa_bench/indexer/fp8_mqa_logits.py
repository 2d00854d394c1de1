"""Index scores over contiguous keys: TFLOP/s on the pairs in range, compared with DeepGEMM and cuDNN-frontend."""

from functools import partial
from typing import Any

import torch

import dsa
from dsa.testing import calc_diff
from dsa_bench.harness import agreement
from dsa_bench.harness.case import Case, flop_rate, fp8_gemm
from dsa_bench.harness.tune import Tuning, TuningClass
from dsa_bench.peers import cudnn, deep_gemm

# queries, keys, heads, head dimension, whether pairs out of range become -inf, accumulators; causal
SHAPES = [
    (4096, 32768, 64, 128, True),
    (2048, 8192, 64, 128, True),
    (4096, 131072, 64, 128, True),
    (8192, 65536, 32, 128, True),
    (4096, 8192, 32, 64, True),
    (4096, 32768, 64, 128, False),
    (2048, 8192, 64, 128, False),
    (4096, 32768, 64, 128, False, "float16"),
    (2048, 8192, 64, 128, False, "float16"),
    (4096, 131072, 64, 128, False, "float16"),
    (8192, 65536, 32, 128, False, "float16"),
]
PROBED = [
    (512, 4096, 64, 128, True, "float32"),
    (512, 4096, 32, 64, False, "float32"),
    (512, 4096, 64, 128, False, "float16"),
]


def case(queries: int, keys: int, heads: int, dim: int, clean: bool = True, accumulators: str = "float32") -> Case:
    q = torch.randn(queries, heads, dim, device="cuda").to(torch.float8_e4m3fn)
    kv = torch.randn(keys, dim, device="cuda").to(torch.float8_e4m3fn), torch.rand(keys, device="cuda") + 0.5
    weights = torch.randn(queries, heads, device="cuda")
    starts = torch.zeros(queries, dtype=torch.int32, device="cuda")
    ends = torch.arange(queries, dtype=torch.int32, device="cuda") + keys - queries
    arguments = (q, kv, weights, starts, ends)
    flop = 2 * int((ends - starts).sum()) * heads * dim
    options = {"clean_logits": clean, "accumulators": getattr(torch, accumulators)}
    scores = partial(dsa.fp8_mqa_logits, *arguments, **options)
    peers = deep_gemm.mqa_logits(*arguments, clean) | cudnn.indexer_scores(q, kv, weights)

    def check(got: torch.Tensor) -> None:
        with dsa.use_backend("reference"):
            expected = scores()
        seen = slice(None) if clean else _seen(ends, keys)
        if not (diff := calc_diff(got[seen], expected[seen])) < 5e-6:
            raise AssertionError(f"calc_diff {diff:.2g}")

    def agree(got: Any, ours: torch.Tensor) -> None:
        """On the pairs in range: cuDNN's rows see one key more, and DeepGEMM 2.8.1 does not write the others."""
        rows = agreement.some(queries)
        seen = _seen(ends[rows], keys)
        agreement.close(agreement.first(got).reshape(queries, keys)[rows][seen], ours[rows][seen])

    name = f"{queries} x {keys}, H {heads}, D {dim}, causal, {'cleaned' if clean else 'not cleaned'}"
    name += "" if accumulators == "float32" else f", {accumulators} accumulators"
    others = {"repeats": 15, "agree": agree, "check": check}
    return Case(name, {"dsa": [scores]}, flop_rate(flop, fp8_gemm), peers, **others)


def _seen(ends: torch.Tensor, keys: int) -> torch.Tensor:
    return torch.arange(keys, device=ends.device) < ends[:, None]


def tuning() -> Tuning:
    from dsa.cute.tuning import candidates
    from dsa.kernels.indexer import fp8_mqa_logits_sm90 as kernel

    sizes = {
        64: [(2048, 8192), (4096, 32768)],
        32: [(4096, 8192), (4096, 32768)],
        16: [(8192, 8192)],
        8: [(8192, 8192)],
    }
    return Tuning(
        dict.fromkeys(candidates(kernel.MqaLogitsConfig), kernel.compile_fp8_mqa_logits),
        {
            f"heads {heads}, dim {dim}": TuningClass(
                lambda config, heads=heads: config.fits(heads),
                {(*size, heads, dim): (heads, dim, "float32", True, False, False) for size in sizes[heads]},
            )
            for heads in sizes
            for dim in (128, 64, 32)
        },
    )
