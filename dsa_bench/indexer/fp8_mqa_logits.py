"""Index scores over contiguous keys: TFLOP/s of the pairs in range, compared with DeepGEMM and cuDNN-frontend."""

from functools import partial
from typing import Any

import torch

import dsa
from dsa_bench.harness.case import (
    Case,
    as_reference,
    causal_ranges,
    close,
    e4m3,
    f32,
    first,
    flop_rate,
    fp8_gemm,
    scales,
    some,
)
from dsa_bench.harness.tune import Tuning, TuningClass
from dsa_bench.peers import cudnn, deep_gemm

# queries, keys, heads, head dimension, whether scores out of range become -inf (cleaned), accumulators (default
# float32); all causal
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
    q, kv, weights = e4m3(queries, heads, dim), (e4m3(keys, dim), scales(keys)), f32(queries, heads)
    starts, ends = causal_ranges(queries, keys)
    arguments = (q, kv, weights, starts, ends)
    scores = partial(dsa.fp8_mqa_logits, *arguments, clean_logits=clean, accumulators=getattr(torch, accumulators))

    def seen(rows: slice) -> torch.Tensor:
        return torch.arange(keys, device=ends.device) < ends[rows, None]

    def agree(theirs: Any, ours: torch.Tensor) -> None:
        """Compare only the pairs in range of some rows. cuDNN's rows see one key more than ours, and DeepGEMM 2.8.1
        does not write scores out of range."""
        rows = some(queries)
        theirs = first(theirs).reshape(queries, keys)[rows]
        close(theirs[seen(rows)], ours[rows][seen(rows)])

    name = f"{queries} x {keys}, H {heads}, D {dim}, causal, {'cleaned' if clean else 'not cleaned'}"
    name += "" if accumulators == "float32" else f", {accumulators} accumulators"
    return Case(
        name,
        {"dsa": [scores]},
        flop_rate(2 * int((ends - starts).sum()) * heads * dim, fp8_gemm),
        deep_gemm.mqa_logits(*arguments, clean) | cudnn.indexer_scores([(q, kv, weights)]),
        repeats=15,
        agree=agree,
        check=as_reference(scores, 5e-6, None if clean else lambda expected: seen(slice(None))),
    )


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
