"""The rows of models on several GPUs: each rank's work. All ranks make the same calls in the same order."""

import zlib
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from dsa_bench.e2e.clock import Clock
from dsa_bench.e2e.command import Row, Tell, free, quiet
from dsa_bench.e2e.parallel_cases import Case, chosen
from dsa_bench.e2e.silent import without_collectives
from dsa_bench.e2e.stacks import STACKS, published_layers, skeleton, stack, with_layers
from dsa_bench.e2e.trace import collectives_share, events_of
from dsa_layers.checkpoint.gpu_plan import plan
from dsa_layers.families.model import CheckpointModel
from dsa_layers.parallel.cuts import cuts_of
from dsa_layers.parallel.ranks import ALONE, Ranks

# Free memory of a GPU for activations, scores, graphs and kernels: passes over 8192 tokens take about half of it.
RESERVE = 10 * 10**9
MOST_COMPARED = 16  # layers compared on one GPU and split: enough that the rest of a pass is small


def shape(model: str, case: str, gpus: int) -> str:
    return f"{model} {case}, {gpus} GPUs"


def rank_rows(
    ranks: Ranks,
    clock: Clock,
    models: Sequence[str] = tuple(STACKS),
    runs: Collection[str] | None = None,
    layers: int | None = None,
    done: Collection[str] = (),
    tell: Tell = quiet,
) -> Iterator[Row]:
    """{"shape", "model", "run", "gpus", "layers", "published_layers", "tokens", "ms", "tokens/s", "figure", "memory",
    "collectives", "shard_ms", "efficiency", "few_layers", "few_ms", "one_gpu_ms", "speedup"} of all cases, or of `runs`
    by their names; the last seven are None for a prompt that is computed once.

    layers      of the split model; None: as many as fit into the GPUs' memory with the caches of all cases
    ms          of a pass, a decoding step as one CUDA graph; the slowest GPU counts, here and below
    memory      peak bytes of tensors on a GPU, weights included
    collectives share of the kernels' time on the first GPU that is data from other GPUs and the wait for them
    shard_ms    the same pass of the same parts without collectives (`without_collectives`); efficiency is shard_ms / ms
    few_layers  as many as fit on one GPU, up to MOST_COMPARED: one_gpu_ms on the first GPU alone, few_ms split over
                all; speedup is one_gpu_ms / few_ms
    """
    for name in models:
        todo = chosen(name, runs, lambda case, name=name: shape(name, case, ranks.size) in done)
        if todo:
            yield from _of_model(name, todo, ranks, clock, layers, tell)


def layers_that_fit(name: str, gpus: int, memory: int, tokens: int) -> int:
    """How many layers of a model, at most its own, fit into so much memory of each of some GPUs with a cache of so many
    tokens. ValueError where none does."""

    def needed(layers: int) -> int:
        model = skeleton(name, **with_layers(name, layers))
        return plan(model.config, model.precision, gpus).bytes(tokens) + RESERVE

    # At least three layers: one of each kind.
    most = published_layers(name)
    found = bisect_right(range(3, most + 1), memory, key=needed) + 2
    if found < 3:
        raise ValueError(
            f"memory: must be at least {needed(3) / 1e9:.1f} GB a GPU for 3 layers of {name} and a cache of {tokens} "
            f"tokens on {gpus} GPUs, got {memory / 1e9:.1f} GB"
        )
    return found


def _of_model(
    name: str, todo: Sequence[Case], ranks: Ranks, clock: Clock, layers: int | None, tell: Tell
) -> Iterator[Row]:
    compared = [case for case in todo if case.repeats]
    few, one_gpu, few_ms = 0, {}, {}
    if compared:
        held = max(case.held for case in compared)
        few = min(layers_that_fit(name, 1, clock.free(), held), MOST_COMPARED, layers or MOST_COMPARED)
    for own, found in ((ALONE, one_gpu), (ranks, few_ms)) if compared else ():
        model = drawn(name, own, clock, tell, **with_layers(name, few))
        for case in compared:
            times = timed(model, case, clock)
            # On one GPU the first one counts, whatever others compute at the same time.
            found[case.name] = (times.max(0).values if own.size > 1 else times[0]).median().item()
            tell(f"{name} {case.name}, {few} layers on {own.size}: {found[case.name]:.2f} ms")
        del model
        free()
    if layers is None:
        layers = layers_that_fit(name, ranks.size, clock.free(), max(case.held for case in todo))
    model = drawn(name, ranks, clock, tell, **with_layers(name, layers))
    for case in todo:
        measured = _measured(model, case, ranks, clock)
        ms, one, split = measured["ms"], one_gpu.get(case.name), few_ms.get(case.name)
        tell(f"{name} {case.name}, {layers} layers on {ranks.size}: {ms:.2f} ms, shard {measured['shard_ms']}")
        yield measured | {
            "shape": shape(name, case.name, ranks.size),
            "model": name,
            "run": case.name,
            "gpus": ranks.size,
            "layers": layers,
            "published_layers": published_layers(name),
            "tokens": case.tokens,
            "tokens/s": case.tokens / ms * 1e3,
            "figure": f"{case.tokens / ms * 1e3:.0f} tokens/s",
            "few_layers": few if case.repeats else None,
            "few_ms": split,
            "one_gpu_ms": one,
            "speedup": one / split if case.repeats else None,
        }
    del model
    free()


def drawn(name: str, own: Ranks, clock: Clock, tell: Tell, **fields: Any) -> CheckpointModel:
    """This rank's part of a stack; RuntimeError unless the tensors that every rank has whole are equal."""
    model = stack(name, clock.device, ranks=own, **fields)
    cut = cuts_of(skeleton(name, **fields), own.size, blocks=True)
    whole = {key: _sum_of_bytes(x) for key, x in model.state_dict().items() if key not in cut}
    for rank, theirs in enumerate(clock.everyones(whole)):
        if differ := [key for key in whole if whole[key] != theirs[key]]:
            raise RuntimeError(f"{differ[0]} is not the same on rank {rank}, of {len(differ)} tensors that should be")
    weights = sum(x.nbytes for x in model.state_dict().values())
    tell(f"{name}, {model.config.num_hidden_layers} layers on {own.size}: drawn, {weights / 1e9:.1f} GB a GPU")
    return model


def _sum_of_bytes(x: torch.Tensor) -> int:
    # torch widens what it sums: a whole tensor of experts would take eight times its memory.
    pieces = x.detach().contiguous().reshape(-1).view(torch.uint8).split(1 << 28)
    return sum(int(piece.sum(dtype=torch.int64)) for piece in pieces)


def timed(model: CheckpointModel, case: Case, clock: Clock) -> torch.Tensor:
    """Milliseconds [ranks, repeats] of a case, after a first call."""
    torch.manual_seed(0)
    run = case.make(model)
    run.timed()
    times = clock.times(run.timed, case.repeats)
    del run
    free()
    return times


def _measured(model: CheckpointModel, case: Case, ranks: Ranks, clock: Clock) -> Row:
    row = _together(model, case, clock)
    free()
    if not case.repeats:
        return row
    with without_collectives(model, ranks):
        shard_ms = timed(model, case, clock).max(0).values.median().item()
    return row | {"shard_ms": shard_ms, "efficiency": shard_ms / row["ms"]}


def _together(model: CheckpointModel, case: Case, clock: Clock) -> Row:
    clock.forget_peak()
    torch.manual_seed(0)  # the caches of all ranks begin with the same bytes
    run, logits = case.make(model), []

    def call() -> None:
        logits[:] = [run.timed()]

    if case.repeats:
        call()
    ms = clock.times(call, max(case.repeats, 1)).max(0).values.median().item()
    row = {"ms": ms, "memory": clock.peak(), "collectives": None, "shard_ms": None, "efficiency": None}
    _check_same(logits[0], case, clock)
    if case.repeats:
        row["collectives"] = collectives_share(events_of(lambda: (clock.meet(), call()), host=False))
    return row


def _check_same(logits: torch.Tensor, case: Case, clock: Clock) -> None:
    found = clock.everyones(zlib.crc32(logits.cpu().contiguous().view(torch.uint8).numpy()))
    if len({*found}) > 1:
        raise RuntimeError(f"{case.name}: ranks have computed other logits, with checksums {found}")
