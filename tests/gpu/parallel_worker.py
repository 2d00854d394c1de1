"""The program that tests/gpu/test_parallel.py runs on each rank. CASE is the name of a function of this file. A rank
saves the function's result to FOLDER/CASE.RANK.

usage: python -m tests.gpu.parallel_worker CASE FOLDER
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dsa
from dsa.parallel import one_shot_sum as one_shot_sums
from dsa.parallel.one_shot_sum import FEW, one_shot_sum, takes_experts
from dsa.parallel.peer_copies import peer_copies
from dsa_layers import Generator, SamplingParams, load_model
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.io import loading
from dsa_layers.parallel.placement import Sharded
from dsa_layers.parallel.ranks import ALONE, Ranks, join
from tests.gpu.batch_invariant_tokens import assert_batch_invariant
from tests.gpu.op_checks import captured

ROWS = (1, 2, 8, 33, 256, 300)
TURNS = 400  # consecutive sums or messages, each of another size
DTYPES = (torch.bfloat16, torch.float32)
WIDTH = 7168
MANY, REPEATS = 4096, 5
OF_TOKENS = [(1, 6, 4096), (1, 8, 7168), (3, 1, 8), (7, 9, 1024), (16, 17, 2048), (200, 8, 1024)]
EXPERTS = [(dtype, *of, shared) for dtype in DTYPES for of in OF_TOKENS for shared in (False, True)]
TOKENS, LENGTHS = [2 + i * i % 2000 for i in range(300)], [200, 100]
PROMPTS = [TOKENS, TOKENS[:3], TOKENS[7:80]]  # together at least 256 tokens, which the ranks divide among themselves


def part(rank: int, rows: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(7 * rank + rows)
    return torch.randn(rows, WIDTH, generator=generator).mul(3.0**rank).to(dtype).to(device)


def sums(ranks: Ranks, device: torch.device, folder: Path) -> dict:
    """Run sums and gathers over the ranks. Return {key: result}, with these keys:

    "one shot", "copies"    whether one-shot sums and peer copies are available
    "cast"                  whether gathered FP8 rows are right
    "other experts"         the cases of EXPERTS for which `same_experts` is False
    "wrong messages", "wrong turns": counts of wrong numbers, by the functions `wrong_messages` and `wrong_turns`
    (name, number of rows, dtype) for each of these names:
        "sum", "replayed"       a sum by a direct call, and by a replayed CUDA graph
        "shared"                the sum of `Sharded`, gathered again
        "begun", "begun, NCCL"  results of `begun` with peer copies, and with NCCL instead
    ("begun", repeat)       results of `begun` for MANY rows
    """
    found = {"one shot": one_shot_sum(ranks.group, device) is not None}
    found["copies"] = peer_copies(ranks.group, device) is not None
    # This call comes first, because it tests that the memory of `peer_copies` grows. The larger messages below would
    # make it large enough.
    found["wrong messages"] = wrong_messages(ranks, device)
    for rows in ROWS:
        for dtype in DTYPES:
            x = part(ranks.rank, rows, dtype, device)
            found["sum", rows, dtype] = ranks.sum(x).cpu()
            held = torch.zeros_like(x)
            graph, y = captured(ranks.sum, held)
            for _ in range(3):
                held.copy_(x)
                graph.replay()
                held.zero_()
            found["replayed", rows, dtype] = y.cpu()
            shared = Sharded(ranks, rows)
            (whole,) = shared.all_gather(shared.reduce(x))
            found["shared", rows, dtype] = whole.cpu()
            own = part(ranks.size, rows, dtype, device)
            found["begun", rows, dtype] = begun(shared, x, own)
            with mock.patch.object(Ranks, "copies", lambda self, x: None):
                found["begun, NCCL", rows, dtype] = begun(shared, x, own)
            del graph
    # A sum of MANY rows takes about as long as the work in `begun`, so either can end first.
    for repeat in range(REPEATS):
        shared = Sharded(ranks, MANY)
        own = part(ranks.size, MANY, torch.bfloat16, device)
        found["begun", repeat] = begun(shared, part(ranks.rank, MANY, torch.bfloat16, device), own)
    cast = torch.arange(300 * 256, device=device).view(300, 256).remainder(13).to(torch.float8_e4m3fn)
    shared = Sharded(ranks, 300)
    (whole,) = shared.all_gather(shared.local(cast))
    found["cast"] = torch.equal(whole.view(torch.uint8), cast.view(torch.uint8))
    found["other experts"] = [case for case in EXPERTS if not same_experts(ranks, device, *case)]
    one_shot = one_shot_sum(ranks.group, device)
    with mock.patch.object(one_shot, "_choose_ctas", lambda places: 3):  # with 3 CTAs, a thread adds several vectors
        found["other experts"] += [case for case in EXPERTS if not same_experts(ranks, device, *case)]
    found["wrong turns"] = wrong_turns(ranks, device)
    return found


def lost_rank(ranks: Ranks, device: torch.device, folder: Path) -> dict:
    """The second rank leaves out a sum. The first rank's sum must end after a timeout, and its next sum must raise an
    error. Return the error's message."""
    x, found = part(ranks.rank, 8, torch.bfloat16, device), {}
    ranks.sum(x)
    with mock.patch.object(one_shot_sums, "PATIENCE", 2 * 10**9):
        if ranks.rank == 0:
            ranks.sum(x)
            torch.cuda.synchronize()
            with pytest.raises(RuntimeError) as raised:
                ranks.sum(x)
            found["error"] = str(raised.value)
    dist.barrier(ranks.group)
    return found


def wrong_turns(ranks: Ranks, device: torch.device) -> int:
    """Count the wrong numbers in TURNS consecutive sums of different sizes and values in a graph.

    A rank that is early must not read an earlier sum's data, or overwrite data that another rank has not read.
    """
    sizes = [8 * (1 + i * i * i % 60000) for i in range(TURNS)]
    own, wrong = torch.zeros(1, device=device), torch.zeros((), dtype=torch.int64, device=device)

    def all_turns() -> None:
        for i, size in enumerate(sizes):
            if i % 7 == ranks.rank:
                torch.cuda._sleep(20000)
            x = (own + i % 50 + ranks.rank).expand(size).to(DTYPES[i % 2])
            whole = ranks.size * (i % 50) + sum(range(ranks.size)) + ranks.size * own
            wrong.add_((ranks.sum(x) != whole).sum())

    graph, _ = captured(all_turns)
    for replay in range(3):
        own.fill_(replay)
        graph.replay()
    return int(wrong)


def same_experts(
    ranks: Ranks, device: torch.device, dtype: torch.dtype, tokens: int, chosen: int, channels: int, shared: bool
) -> bool:
    """Whether `sum_of_experts` has the bits of the ranks' sum of `combine_experts`, in a direct call and in a graph.

    The fused kernel runs for few tokens only.
    """
    generator = torch.Generator().manual_seed(tokens + ranks.rank)
    y = torch.randn(tokens * chosen, channels, generator=generator).to(dtype).to(device)
    rows = torch.randperm(tokens * chosen, generator=generator).view(tokens, chosen).to(torch.int32)
    rows[torch.rand(tokens, chosen, generator=generator) < 0.5] = -1  # this token's expert belongs to another rank
    rows[0, 0] = tokens * chosen + 3
    y[-1] = torch.nan  # no valid index names this row
    rows[rows == tokens * chosen - 1] = 0
    weights = torch.rand(tokens, chosen, generator=generator)
    weights[rows < 0] = torch.inf
    rows, weights = rows.to(device), weights.to(device)
    own = torch.randn(tokens, channels, generator=generator).to(dtype).to(device) if shared else None
    few = tokens * channels * dtype.itemsize <= FEW
    with torch.inference_mode():
        assert takes_experts(y, rows, weights, own, ranks.size) == few
    expected = ranks.sum(dsa.combine_experts(y, rows, weights, own))
    with torch.inference_mode():
        got = ranks.sum_of_experts(y, rows, weights, own)
        graph, replayed = captured(ranks.sum_of_experts, y, rows, weights, own)
        graph.replay()
    return torch.equal(got, expected) and torch.equal(replayed, expected) and bool(expected.isfinite().all())


def wrong_messages(ranks: Ranks, device: torch.device) -> int:
    """Count the wrong numbers in TURNS gathers and sums of rows. A gather and a sum run at the same time.

    A rank that is early must not overwrite data that another rank has not read.
    """
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for i in range(TURNS):
        shared = Sharded(ranks, 1 + i * i * i % 3000)
        # `peer_copies` copies both messages at the same time, each in a lane with its own memory. Every fifth width
        # exceeds all earlier widths, so a lane's memory must grow while the other lane copies.
        width = i % 300 + 1 if i % 5 else 1 + i * 5
        every = torch.arange(shared.count, device=device)[:, None] + torch.arange(width, device=device) + i
        if i % 7 == ranks.rank:
            torch.cuda._sleep(200000)
        gathering = shared.start_all_gather(shared.local(every).to(torch.int16), shared.local(every).double())
        summing = shared.start_reduce((every % 128 + ranks.rank).bfloat16())
        whole = ranks.size * shared.local(every % 128) + sum(range(ranks.size))
        for x, dtype in zip(gathering(), (torch.int16, torch.float64)):
            wrong.add_((x != every.to(dtype)).sum())
        wrong.add_((summing() != whole.bfloat16()).sum())
    return int(wrong)


def begun(rows: Sharded, x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return the sum of the ranks' x plus two times `own` (the shared experts' output and the residual), gathered from
    all ranks.

    The addends are computed in newly allocated memory while the sum runs. Matrix products also run during the gather.
    """

    def computed() -> torch.Tensor:
        for _ in range(4):
            torch.mm(own.T, own)
        return rows.local(own).clone()

    end = rows.start_reduce(x)
    del x
    total = end(computed(), computed())
    end = rows.start_all_gather(total)
    computed()
    (whole,) = end()
    return whole.cpu()


def outcome(model: torch.nn.Module, device: torch.device) -> dict:
    """Return {"logits": of all TOKENS, "tokens": of three generations, the last without CUDA graphs}."""
    with torch.inference_mode():
        batch = SequenceBatch.without_cache(LENGTHS, device=device)
        logits = model(torch.tensor(TOKENS, device=device), batch, all_tokens=True)
    model.config = replace(model.config, eos_token_ids=())  # random models sometimes emit an end token
    tokens = []
    for graphs in (True, True, False):
        generator = Generator(model, None, cache_tokens=2048, cuda_graphs=graphs)
        tokens.append([c.tokens for c in generator.generate(PROMPTS, SamplingParams(max_tokens=24))])
    return {"logits": logits.cpu(), "tokens": tokens}


def models(ranks: Ranks, device: torch.device, folder: Path) -> dict:
    """Return {checkpoint: the `outcome` of the model divided between both ranks}. On the first rank each outcome also
    has the key "whole": the outcome on one GPU."""
    found = {}
    for directory in sorted(path for path in folder.iterdir() if path.is_dir()):
        found[directory.name] = outcome(load_model(directory, device=device, mesh=ranks, progress=False), device)
        if ranks.rank == 0:
            whole = load_model(directory, device=device, mesh=ALONE, progress=False)
            found[directory.name]["whole"] = outcome(whole, device)
    return found


BATCH_INVARIANT = "deepseek_v32", "deepseek_v4", "glm_moe_dsa"  # families with batch-invariant kernels


def batch_invariant(ranks: Ranks, device: torch.device, folder: Path) -> dict:
    """Return {checkpoint: new tokens of each sequence}.

    One-shot sums are limited to 20 KiB here, so larger sums run through NCCL. From 16 rows per rank on, each rank sums
    only a part of the rows.
    """
    found = {}
    for directory in (folder / name for name in BATCH_INVARIANT):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(one_shot_sums, "most_bytes", lambda ranks: 20 << 10)
            model = load_model(directory, device=device, mesh=ranks, drafter=True, progress=False)
            model.config = replace(model.config, eos_token_ids=())
            found[directory.name] = assert_batch_invariant(model, patch)
    return found


def no_memory(ranks: Ranks, device: torch.device, folder: Path) -> dict:
    """The second rank lacks the memory for the rank's part of the weights."""
    load_weights = loading.load_weights

    def starved(*arguments: Any, **options: Any) -> None:
        if ranks.rank == 1:
            torch.cuda.set_per_process_memory_fraction(1e-6, device)
        try:
            load_weights(*arguments, **options)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)

    loading.load_weights = starved
    load_model(next(path for path in sorted(folder.iterdir()) if path.is_dir()), device=device, mesh=ranks)
    return {}


CASES = {function.__name__: function for function in (sums, lost_rank, models, batch_invariant, no_memory)}

if __name__ == "__main__":
    case, place = sys.argv[1], Path(sys.argv[2])
    own, gpu = join("cuda")
    try:
        torch.save(CASES[case](own, gpu, place), place / f"{case}.{own.rank}")
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
