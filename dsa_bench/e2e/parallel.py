"""Models split over several GPUs of one machine, compared with the same parts without collectives and with one GPU.

`rows` starts a process per GPU, a rank. All ranks run `rank_rows`, which makes the same calls in the same order on each
rank, and the first rank prints the rows.
"""

import contextlib
import json
import subprocess
import sys
import zlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dsa.runtime.variants import Variant
from dsa_bench.e2e.clock import Clock
from dsa_bench.e2e.command import (
    Row,
    Tell,
    asked_of,
    compiled_rows,
    free,
    in_order,
    of_models,
    pass_row,
    quiet,
    seconds_told,
)
from dsa_bench.e2e.parts import collectives_share, events_of
from dsa_bench.e2e.report import CHUNK
from dsa_bench.e2e.runs import Model, Run, decode, prefill
from dsa_bench.e2e.silent import SilentRanks, without_collectives
from dsa_bench.e2e.stacks import STACKS, published_layers, skeleton, stack, with_layers
from dsa_layers.engine.split import cuts_of, split
from dsa_layers.io.gpu_plan import plan
from dsa_layers.models.family import published_config
from dsa_layers.models.protocols import CheckpointModel
from dsa_layers.options import positive
from dsa_layers.parallel.launch import launch, started_ranks
from dsa_layers.parallel.ranks import ALONE, Ranks, join

MANY = 8  # number of GPUs for which `computed.py` computes the time, from measurements on fewer GPUs
COMMAND = (sys.executable, "-m", "dsa_bench.e2e.parallel")
# Bytes per GPU for activations, scores, graphs and kernels. Passes over 8192 tokens take about half of them.
RESERVE = 10 * 10**9
# Largest number of layers for the comparison between one GPU and all GPUs. With 16 layers, the part of a pass outside
# the layers is small.
MOST_COMPARED = 16
# {tokens of a prompt: how often it is timed}. 0: timed once, without a warm-up, because it takes a minute.
PROMPTS = {4096: 10, 32768: 3, 131072: 1, 1048576: 0}
SEQUENCES, CONTEXT = (1, 8, 32, 128, 256), 8192
STEP_REPEATS = 20


@dataclass(frozen=True)
class Case:
    """A prompt or a decoding step. tokens: number of tokens that it computes. held: tokens in the cache at its end.
    repeats: how often it is timed; 0: once, without warm-up and comparisons. make: model -> the run."""

    name: str
    tokens: int
    held: int
    repeats: int
    make: Callable[[Model], Run]


def cases(model: str) -> list[Case]:
    """Return the cases of a published model. Prompts longer than the model's context are left out."""
    context = published_config(STACKS[model][0])["max_position_embeddings"]
    prompts = [
        Case(f"prefill {n}", n, n, repeats, partial(prefill, count=1, tokens=n, chunk=CHUNK))
        for n, repeats in PROMPTS.items()
        if n <= context
    ]
    steps = [
        Case(f"decode {n} x {CONTEXT}", n, n * CONTEXT, STEP_REPEATS, partial(decode, count=n, context=CONTEXT))
        for n in SEQUENCES
    ]
    return [*prompts, *steps]


def names() -> list[str]:
    return list(dict.fromkeys(case.name for model in STACKS for case in cases(model)))


OPTIONS = of_models(STACKS) | {
    "--gpus": {"type": positive, "default": 2, "metavar": "N", "help": "default: 2"},
    "--one": {"action": "store_true", "help": "only one GPU's part, without collectives, which needs one GPU"},
    "--runs": {"nargs": "+", "choices": names(), "metavar": "RUN", "help": f"of {', '.join(names())}"},
    "--layers": {"type": positive, "metavar": "N", "help": "of split models (default: all that fit)"},
    "--done": {"action": "append", "default": [], "metavar": "SHAPE", "help": "a row that is left out"},
}


def asked(
    gpus: int, models: Sequence[str] = tuple(STACKS), runs: Collection[str] | None = None, **others: Any
) -> list[Variant]:
    """Return the kernels that the models' passes need, both split over `gpus` GPUs and on one GPU, sorted.

    others: the other options of `rows`, which change no kernel.
    """
    return in_order(
        asked_of_part(name, ranks, found)
        for name in models
        if (found := todo(name, gpus, runs, ()))
        for ranks in (SilentRanks(0, gpus), ALONE)
    )


def asked_of_part(name: str, ranks: Ranks, todo: Sequence[Case]) -> set[Variant]:
    model = skeleton(name)
    split(model, ranks, blocks=True)

    prompts, steps = [], []
    for case in todo:
        if case.name.startswith("decode"):
            steps.append((case.tokens, CONTEXT))
            continue
        # Passes after the eighth need the same kernels as the last pass.
        begins = {*range(0, min(case.tokens, 8 * CHUNK), CHUNK), max(case.tokens - CHUNK, 0)}
        prompts += [[(min(CHUNK, case.tokens - begin), begin)] for begin in begins]
    with without_collectives(model, ranks):
        return asked_of(model, prompts, steps)


def shape(model: str, case: str, gpus: int, one: bool = False) -> str:
    """Return the name of a row. one: the row is of one GPU's part (`part_rows`)."""
    return f"{model} {case}, {'one of ' if one else ''}{gpus} GPUs"


def todo(model: str, gpus: int, runs: Collection[str] | None, done: Collection[str], one: bool = False) -> list[Case]:
    found = (case for case in cases(model) if runs is None or case.name in runs)
    return [case for case in found if shape(model, case.name, gpus, one) not in done]


def rank_rows(
    ranks: Ranks,
    clock: Clock,
    models: Sequence[str] = tuple(STACKS),
    runs: Collection[str] | None = None,
    layers: int | None = None,
    done: Collection[str] = (),
    tell: Tell = quiet,
) -> Iterator[Row]:
    """Yield {"shape", "model", "run", "gpus", "layers", "published_layers", "tokens", "ms", "tokens/s", "figure",
    "memory", "collectives", "shard_ms", "efficiency", "few_layers", "few_ms", "one_gpu_ms", "speedup"} per case of the
    models; with `runs` only of the cases that it names. The last seven are None for a prompt that is computed once.

    layers      number of layers of the split model. If the argument is None: as many as fit into the GPUs' memory with
                the largest cache
    ms          milliseconds of the case, a decoding step as one CUDA graph; the slowest GPU counts, here and below
    memory      peak bytes of tensors on a GPU, with weights
    collectives fraction of the first GPU's time in which only collectives run (`collectives_share`)
    shard_ms    milliseconds of the case without collectives (`without_collectives`); efficiency is shard_ms / ms
    few_layers  number of layers of a smaller model for the comparison with one GPU: as many as fit on one GPU, but at
                most MOST_COMPARED and `layers`. The time of this model is one_gpu_ms on the first GPU and few_ms split
                over all GPUs; speedup is one_gpu_ms / few_ms
    """
    for name in models:
        if found := todo(name, ranks.size, runs, done):
            yield from _of_model(name, found, ranks, clock, layers, tell)


def part_rows(
    gpus: int,
    models: Sequence[str] = tuple(STACKS),
    runs: Collection[str] | None = None,
    layers: int | None = None,
    done: Collection[str] = (),
    clock: Clock | None = None,
    tell: Tell = quiet,
) -> Iterator[Row]:
    """Yield {"shape", "model", "run", "gpus", "layers", "published_layers", "tokens", "shard_ms", "memory", "ms",
    "figure"} per case. One GPU runs the part of the first of `gpus` ranks, without collectives (`silent.py`).

    `computed.py` computes the time of all GPUs from these rows and from the collectives on fewer GPUs. Prompts with
    `repeats` 0 have no row: they are timed only once. ms is shard_ms. clock: by default of the current GPU. Other
    fields and arguments: as in `rank_rows`.
    """
    clock = clock or Clock(ALONE, torch.device("cuda", torch.cuda.current_device()))
    ranks = SilentRanks(0, gpus)
    for name in models:
        found = [case for case in todo(name, gpus, runs, done, one=True) if case.repeats]
        if not found:
            continue
        most = layers or layers_that_fit(name, gpus, clock.free(), max(case.held for case in found))
        model = part_of_stack(name, ranks, clock, tell, **with_layers(name, most))
        for case in found:
            clock.forget_peak()
            with without_collectives(model, ranks):
                ms = timed(model, case, clock).median().item()
            tell(f"{name} {case.name}, {most} layers, one of {gpus}: {ms:.2f} ms")
            yield _case(name, case, gpus, most, one=True) | {
                "shard_ms": ms,
                "memory": clock.peak(),
                "ms": ms,
                "figure": f"{ms:.2f} ms in silence",
            }
        del model
        free()


def _case(name: str, case: Case, gpus: int, layers: int, one: bool = False) -> Row:
    return {
        "shape": shape(name, case.name, gpus, one),
        "model": name,
        "run": case.name,
        "gpus": gpus,
        "layers": layers,
        "published_layers": published_layers(name),
        "tokens": case.tokens,
    }


def layers_that_fit(name: str, gpus: int, memory: int, tokens: int) -> int:
    """Return how many of a model's layers fit into `memory` bytes per GPU with a cache of `tokens` tokens.

    Raises ValueError if fewer than three layers fit.
    """

    def needed(layers: int) -> int:
        model = skeleton(name, **with_layers(name, layers))
        return plan(model.config, model.precision, gpus).bytes(tokens) + RESERVE

    # Begin at three layers, enough for one of each kind. `bisect_right` counts how many of the numbers 3, 4, ... fit.
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
        few = min(
            layers_that_fit(name, 1, clock.free(), max(case.held for case in compared)),
            MOST_COMPARED,
            layers or MOST_COMPARED,
        )
    for some, found in ((ALONE, one_gpu), (ranks, few_ms)) if compared else ():
        model = part_of_stack(name, some, clock, tell, **with_layers(name, few))
        for case in compared:
            times = timed(model, case, clock)
            # With ALONE every GPU runs the complete model at the same time, and the first GPU's time counts.
            found[case.name] = (times.max(0).values if some.size > 1 else times[0]).median().item()
            tell(f"{name} {case.name}, {few} layers on {some.size}: {found[case.name]:.2f} ms")
        del model
        free()
    if layers is None:
        layers = layers_that_fit(name, ranks.size, clock.free(), max(case.held for case in todo))
    model = part_of_stack(name, ranks, clock, tell, **with_layers(name, layers))
    for case in todo:
        measured = _measured(model, case, ranks, clock)
        ms, one, split = measured["ms"], one_gpu.get(case.name), few_ms.get(case.name)
        tell(f"{name} {case.name}, {layers} layers on {ranks.size}: {ms:.2f} ms, shard {measured['shard_ms']}")
        yield (
            pass_row(name, case.name, case.tokens, ms)
            | _case(name, case, ranks.size, layers)
            | measured
            | {
                "few_layers": few if case.repeats else None,
                "few_ms": split,
                "one_gpu_ms": one,
                "speedup": one / split if case.repeats else None,
            }
        )
    del model
    free()


def part_of_stack(name: str, ranks: Ranks, clock: Clock, tell: Tell, **fields: Any) -> CheckpointModel:
    """Make this rank's part of a stack. Raises RuntimeError if a tensor that is not split differs between ranks."""
    model = stack(name, clock.device, ranks=ranks, **fields)
    cut = cuts_of(skeleton(name, **fields), ranks.size, blocks=True)
    whole = {key: _sum_of_bytes(x) for key, x in model.state_dict().items() if key not in cut}
    for rank, theirs in enumerate(clock.gather(whole)):
        if differ := [key for key in whole if whole[key] != theirs[key]]:
            raise RuntimeError(f"{differ[0]} is not the same on rank {rank}, of {len(differ)} tensors that should be")
    weights = sum(x.nbytes for x in model.state_dict().values())
    tell(f"{name}, {model.config.num_hidden_layers} layers on {ranks.size}: made, {weights / 1e9:.1f} GB a GPU")
    return model


def _sum_of_bytes(x: torch.Tensor) -> int:
    # Sum in pieces: torch widens the bytes to int64 first, so a tensor of experts would need eight times its memory.
    pieces = x.detach().contiguous().reshape(-1).view(torch.uint8).split(1 << 28)
    return sum(int(piece.sum(dtype=torch.int64)) for piece in pieces)


def timed(model: CheckpointModel, case: Case, clock: Clock) -> torch.Tensor:
    """Return the milliseconds [ranks, repeats] of a case, after a first call that is not timed."""
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
    torch.manual_seed(0)  # so that the caches of all ranks start with the same bytes
    run, logits = case.make(model), []

    def call() -> None:
        logits[:] = [run.timed()]

    if case.repeats:
        call()
    ms = clock.times(call, max(case.repeats, 1)).max(0).values.median().item()
    row = {"ms": ms, "memory": clock.peak(), "collectives": None, "shard_ms": None, "efficiency": None}
    _check_same(logits[0], case, clock)
    if case.repeats:
        row["collectives"] = collectives_share(events_of(lambda: (clock.align(), call()), host=False))
    return row


def _check_same(logits: torch.Tensor, case: Case, clock: Clock) -> None:
    found = clock.gather(zlib.crc32(logits.cpu().contiguous().view(torch.uint8).numpy()))
    if len({*found}) > 1:
        raise RuntimeError(f"{case.name}: ranks have computed other logits, with checksums {found}")


def rows(
    gpus: int = 2,
    one: bool = False,
    models: Sequence[str] = tuple(STACKS),
    runs: Collection[str] | None = None,
    layers: int | None = None,
    done: Collection[str] = (),
    tell: Tell = quiet,
) -> Iterator[Row]:
    """Return the rows of `rank_rows`, which a process per GPU computes. These processes print their steps to standard
    error and do not call `tell`. one: return the rows of `part_rows` instead, computed by this process.

    Raises ValueError for a number of GPUs that cannot be used. The iterator raises RuntimeError after the last row if
    the processes fail.
    """
    choice = {"models": models, "runs": runs, "layers": layers, "done": done}
    if one:
        return part_rows(gpus, **choice, tell=tell)
    count = torch.cuda.device_count()
    if not 2 <= gpus <= count:
        raise ValueError(f"--gpus: must be at least 2 and at most the {count} that torch sees, got {gpus}")
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # other processes need the memory
    return _printed([*COMMAND, json.dumps(choice | {"gpus": gpus})])


def _printed(call: Sequence[str]) -> Iterator[Row]:
    """Yield the rows that a command prints as lines of JSON. Raise RuntimeError after the last row if the command
    fails."""
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()  # the caller may stop before the last row
    if process.returncode:
        raise RuntimeError(f"{' '.join(call)} ended with {process.returncode}")


def all_rows(done: Collection[str] = ()) -> Iterator[Row]:
    """Yield the rows for two GPUs, for one of MANY GPUs, and for four GPUs, if the machine has that many."""
    count = torch.cuda.device_count()
    if count >= 2:
        yield from compiled_rows("parallel", gpus=2, done=done)
    yield from compiled_rows("parallel", gpus=MANY, one=True, done=done)
    if count >= 4:
        yield from compiled_rows("parallel", gpus=4, done=done)


def main(choice: str) -> int:
    """Start the ranks or, in a rank, compute the rows. choice: {"gpus", "models", "runs", "layers", "done"} as JSON."""
    given = json.loads(choice)
    gpus = given.pop("gpus")
    if started_ranks() is None:
        return launch([*COMMAND, choice], gpus)
    ranks, device = join("cuda")
    first = ranks.rank == 0
    for row in rank_rows(ranks, Clock(ranks, device), **given, tell=seconds_told() if first else quiet):
        if first:
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
