"""Index scores over paged keys: bytes per second, compared with the DeepGEMM builds that vLLM and SGLang ship.
Our scores with fp16 accumulators are also compared with ours with fp32 accumulators. One shape times the plan
(`get_paged_mqa_logits_metadata`) instead of the scores."""

from functools import partial
from typing import Any

import torch

import dsa
from dsa_bench.harness.case import (
    Call,
    Case,
    as_reference,
    bytes_rate,
    close,
    e4m3,
    f32,
    fresh,
    microseconds,
    scales,
    some,
)
from dsa_bench.harness.tune import Tuning, TuningClass
from dsa_bench.peers import deep_gemm

# batch, queries per sequence, mean context, heads, accumulators (default float32). With a mean context of 0 only the
# plan is timed.
SHAPES = [
    (128, 1, 32768, 64),
    (64, 1, 8192, 64),
    (64, 1, 32768, 64),
    (64, 2, 32768, 64),
    (64, 4, 32768, 64),
    (64, 3, 32768, 64, "float16"),
    (64, 4, 32768, 64, "float16"),
    (128, 4, 8192, 64, "float16"),
    (128, 1, 8192, 64),
    (8, 1, 131072, 64),
    (1, 1, 131072, 64),
    (1024, 1, 2048, 64),
    (64, 1, 32768, 32),
    (128, 1, 0, 64),
]
PROBED = [
    *((4, n, 4096, heads, "float32") for n, heads in ((1, 64), (2, 64), (4, 64), (1, 32))),
    (4, 4, 4096, 64, "float16"),
    (4, 1, 0, 64, "float32"),
]
DIM, PAGE = 128, 64
_PLANS = 8  # calls per graph; each call makes the plan
_FP32 = "dsa, float32 accumulators"


def paged_inputs(lengths: torch.Tensor, next_n: int, heads: int) -> tuple[Any, ...]:
    """Return (q, cache, weights, lengths, block table) on the GPU. lengths: the sequences' numbers of keys, int32 [B]
    on the CPU. next_n: queries per sequence."""
    batch, used = len(lengths), -(-lengths // PAGE)
    pages, width = int(used.sum()), int(used.max())
    cache = torch.cat((e4m3(pages, PAGE * DIM).view(torch.uint8), scales(pages, PAGE).view(torch.uint8)), 1)
    table = torch.full((batch, width), -1, dtype=torch.int32)
    table[torch.arange(width) < used[:, None]] = torch.randperm(pages, dtype=torch.int32)
    q, weights = e4m3(batch, next_n, heads, DIM), f32(batch * next_n, heads)
    return q, cache.view(pages, PAGE, 1, DIM + 4), weights, lengths.cuda(), table.cuda()


def _inputs(batch: int, next_n: int, mean: int, heads: int) -> tuple[Any, ...]:
    low, high = (mean, mean + 1) if batch == 1 else (int(0.7 * mean), int(1.3 * mean))
    lengths = torch.randint(low, high, (batch,), dtype=torch.int32)
    return *paged_inputs(lengths, next_n, heads), int(lengths.max())


def _call(accumulators: str, q, cache, weights, lengths, table, columns) -> Call:
    plan = dsa.get_paged_mqa_logits_metadata(lengths, PAGE, dsa.num_sms("cuda"))
    return partial(
        *(dsa.fp8_paged_mqa_logits, q, cache, weights, lengths, table, plan, columns),
        accumulators=getattr(torch, accumulators),
    )


def _plan_case(batch: int) -> Case:
    lengths = torch.randint(1, 32768, (batch,), dtype=torch.int32, device="cuda")
    ours = partial(dsa.get_paged_mqa_logits_metadata, lengths, PAGE, dsa.num_sms("cuda"))

    def agree(theirs: torch.Tensor, ours: torch.Tensor) -> None:
        """Compare only the shapes, because a library may split the work differently."""
        if theirs.shape != ours.shape:
            raise AssertionError(f"differs: shape {list(theirs.shape)}, where ours is {list(ours.shape)}")

    return Case(
        f"the plan, B {batch}",
        {"dsa": [ours] * _PLANS},
        microseconds,
        deep_gemm.plans(lengths, PAGE, _PLANS),
        graph=True,
        agree=agree,
    )


def case(batch: int, next_n: int, mean: int, heads: int, accumulators: str = "float32") -> Case:
    if mean == 0:
        return _plan_case(batch)
    size = batch * mean * (DIM + 4)
    inputs = fresh(size, partial(_inputs, batch, next_n, mean, heads), most=1 << 16, total=128 << 20)
    calls = {"dsa": [_call(accumulators, *i) for i in inputs]}
    name = f"B {batch}, next_n {next_n}, mean context {mean}, H {heads}, D {DIM}"
    if accumulators != "float32":
        name += f", {accumulators} accumulators"
        calls[_FP32] = [_call("float32", *i) for i in inputs]
    keys = sum(int(lengths.sum()) for *_, lengths, _, _ in inputs) / len(inputs)

    def agree(theirs: torch.Tensor, ours: torch.Tensor) -> None:
        *_, lengths, _, columns = inputs[0]
        rows = some(len(ours))
        visible = deep_gemm.visible_keys(lengths, next_n).flatten()[rows]
        seen = torch.arange(columns, device=ours.device) < visible[:, None]
        close(theirs[rows][seen], ours[rows][seen])

    return Case(
        name,
        calls,
        bytes_rate(keys * (DIM + 4 + 4 * next_n), us=False),
        deep_gemm.paged_mqa_logits(inputs),
        graph=True,
        yardsticks={_FP32},
        agree=agree,
        check=as_reference(calls["dsa"][0], 5e-6, lambda expected: expected != -torch.inf),
    )


def tuning() -> Tuning:
    from dsa.cute.tuning import candidates
    from dsa.kernels.indexer import fp8_paged_mqa_logits_sm90 as kernel

    # The kernel's product has heads * next_n columns. Tune one pair (heads, next_n) per number of columns: the one with
    # the smallest next_n, which comes last and replaces the others.
    columns = {heads * next_n: (heads, next_n) for next_n in (4, 3, 2, 1) for heads in (8, 16, 32, 64)}
    return Tuning(
        dict.fromkeys(candidates(kernel.PagedMqaLogitsConfig), kernel.compile_fp8_paged_mqa_logits),
        {
            f"columns {n}": TuningClass(
                lambda config, n=n: config.fits(n),
                {
                    (batch, next_n, mean, heads): (heads, DIM, next_n, PAGE, "float32", False)
                    for batch, mean in ((64, 8192), (128, 32768), (1, 131072))
                },
            )
            for n, (heads, next_n) in sorted(columns.items())
        },
    )
