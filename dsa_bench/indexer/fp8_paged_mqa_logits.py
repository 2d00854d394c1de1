"""Index scores over paged keys: bytes per second, compared with both builds of DeepGEMM. With fp16 accumulators
also compared with fp32 ones. And the time of the plan, `get_paged_mqa_logits_metadata`."""

from functools import partial
from typing import Any

import torch

import dsa
from dsa.testing import calc_diff
from dsa_bench.harness import agreement
from dsa_bench.harness.calls import Call
from dsa_bench.harness.case import Case, bytes_rate, fresh
from dsa_bench.harness.tune import Tuning, TuningClass
from dsa_bench.peers import deep_gemm

# batch, queries a sequence, mean context, heads, accumulators; a context of 0: the plan alone
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
_PLANS = 8  # in a graph
_FP32 = "dsa, float32 accumulators"


def paged_inputs(lengths: torch.Tensor, next_n: int, heads: int) -> tuple[Any, ...]:
    """(q, cache, weights, lengths, block table) of sequences with so many keys, int32 [B] on the CPU."""
    batch, used = len(lengths), -(-lengths // PAGE)
    pages, width = int(used.sum()), int(used.max())
    keys = torch.randn(pages, PAGE * DIM, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
    scales = (torch.rand(pages, PAGE, device="cuda") + 0.5).view(torch.uint8)
    cache = torch.cat((keys, scales), 1).view(pages, PAGE, 1, DIM + 4)
    table = torch.full((batch, width), -1, dtype=torch.int32)
    table[torch.arange(width) < used[:, None]] = torch.randperm(pages, dtype=torch.int32)
    q = torch.randn(batch, next_n, heads, DIM, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.randn(batch * next_n, heads, device="cuda")
    return q, cache, weights, lengths.cuda(), table.cuda()


def _inputs(batch: int, next_n: int, mean: int, heads: int) -> tuple[Any, ...]:
    low, high = (mean, mean + 1) if batch == 1 else (int(0.7 * mean), int(1.3 * mean))
    lengths = torch.randint(low, high, (batch,), dtype=torch.int32)
    return *paged_inputs(lengths, next_n, heads), int(lengths.max())


def _call(accumulators: str, q, cache, weights, lengths, table, columns) -> Call:
    plan = dsa.get_paged_mqa_logits_metadata(lengths, PAGE, dsa.num_sms("cuda"))
    arguments = (q, cache, weights, lengths, table, plan, columns)
    return partial(dsa.fp8_paged_mqa_logits, *arguments, accumulators=getattr(torch, accumulators))


def _plan_case(batch: int) -> Case:
    lengths = torch.randint(1, 32768, (batch,), dtype=torch.int32, device="cuda")
    peers = deep_gemm.plans(lengths, PAGE, _PLANS)
    ours = partial(dsa.get_paged_mqa_logits_metadata, lengths, PAGE, dsa.num_sms("cuda"))

    def agree(got: torch.Tensor, ours: torch.Tensor) -> None:
        """Each splits the work differently; all plans have a row per SM."""
        if got.shape != ours.shape:
            raise AssertionError(f"differs: shape {list(got.shape)}, where ours is {list(ours.shape)}")

    options = {"graph": True, "agree": agree}
    return Case(f"the plan, B {batch}", {"dsa": [ours] * _PLANS}, lambda ms: f"{ms * 1e3:.1f} us", peers, **options)


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
    figure = bytes_rate(keys * (DIM + 4 + 4 * next_n), us=False)

    def check(got: torch.Tensor) -> None:
        with dsa.use_backend("reference"):
            expected = _call(accumulators, *inputs[0])()
        if not (diff := calc_diff(torch.where(expected == -torch.inf, expected, got), expected)) < 5e-6:
            raise AssertionError(f"calc_diff {diff:.2g}")

    def agree(got: torch.Tensor, ours: torch.Tensor) -> None:
        """On the keys that a row sees."""
        *_, lengths, _, columns = inputs[0]
        rows = agreement.some(len(ours))
        visible = deep_gemm.visible_keys(lengths, next_n).flatten()[rows]
        seen = torch.arange(columns, device=ours.device) < visible[:, None]
        agreement.close(got[rows][seen], ours[rows][seen])

    others = {"graph": True, "yardsticks": frozenset({_FP32}), "agree": agree, "check": check}
    return Case(name, calls, figure, deep_gemm.paged_mqa_logits(inputs), **others)


def tuning() -> Tuning:
    from dsa.cute.tuning import candidates
    from dsa.kernels.indexer import fp8_paged_mqa_logits_sm90 as kernel

    # One (heads, next_n) for each number of columns.
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
