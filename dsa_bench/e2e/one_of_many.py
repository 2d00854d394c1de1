"""One GPU's part of a model split over more GPUs than the machine has, without collectives (`silent.py`).

The time of N GPUs is computed from these rows and from the collectives of fewer GPUs (`computed.py`).
"""

from collections.abc import Collection, Iterator, Sequence

import torch

from dsa_bench.e2e.clock import Clock
from dsa_bench.e2e.command import Row, Tell, free, quiet
from dsa_bench.e2e.parallel_rows import asked, chosen, layers_that_fit, options, part_of_stack, timed
from dsa_bench.e2e.silent import SilentRanks, without_collectives
from dsa_bench.e2e.stacks import STACKS, published_layers, with_layers
from dsa_layers.parallel.ranks import ALONE

__all__ = ["OPTIONS", "asked", "rows", "shape"]
GPUS = 8
OPTIONS = options(GPUS)


def shape(model: str, case: str, gpus: int) -> str:
    return f"{model} {case}, one of {gpus} GPUs"


def rows(
    gpus: int = GPUS,
    models: Sequence[str] = tuple(STACKS),
    runs: Collection[str] | None = None,
    layers: int | None = None,
    done: Collection[str] = (),
    clock: Clock | None = None,
    tell: Tell = quiet,
) -> Iterator[Row]:
    """Yield {"shape", "model", "run", "gpus", "layers", "published_layers", "tokens", "shard_ms", "memory", "ms",
    "figure"} of the first of `gpus` GPUs.

    Prompts that are computed once have no row. ms is shard_ms. clock: by default of the current GPU. Other fields and
    arguments: as in `parallel_rows.rank_rows`.
    """
    clock = clock or Clock(ALONE, torch.device("cuda", torch.cuda.current_device()))
    ranks = SilentRanks(0, gpus)
    for name in models:
        todo = chosen(name, runs, lambda case, name=name: shape(name, case, gpus) in done)
        todo = [case for case in todo if case.repeats]
        if not todo:
            continue
        most = layers or layers_that_fit(name, gpus, clock.free(), max(case.held for case in todo))
        model = part_of_stack(name, ranks, clock, tell, **with_layers(name, most))
        for case in todo:
            clock.forget_peak()
            with without_collectives(model, ranks):
                ms = timed(model, case, clock).median().item()
            tell(f"{name} {case.name}, {most} layers, one of {gpus}: {ms:.2f} ms")
            yield {
                "shape": shape(name, case.name, gpus),
                "model": name,
                "run": case.name,
                "gpus": gpus,
                "layers": most,
                "published_layers": published_layers(name),
                "tokens": case.tokens,
                "shard_ms": ms,
                "memory": clock.peak(),
                "ms": ms,
                "figure": f"{ms:.2f} ms in silence",
            }
        del model
        free()
