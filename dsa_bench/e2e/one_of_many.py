"""One GPU's part of a model that is split over more GPUs than there are, in silence (`silent.py`).

usage: python -m dsa_bench.e2e.one_of_many [--gpus N] [--models MODEL...] [--runs RUN...] [--layers N]

It prints a line of JSON for each row. What N GPUs take together is computed from these rows, and from what fewer say to
each other (`computed.py`).
"""

import argparse
import json
import sys
from collections.abc import Collection, Iterator, Sequence

import torch

from dsa.runtime import backends
from dsa_bench.e2e.clock import Clock
from dsa_bench.e2e.parallel_cases import chosen, names
from dsa_bench.e2e.parallel_kernels import prepare
from dsa_bench.e2e.parallel_rows import Row, Tell, drawn, free, layers_that_fit, seconds_told, timed
from dsa_bench.e2e.silent import SilentRanks, without_collectives
from dsa_bench.e2e.stacks import STACKS, published_layers, with_layers
from dsa_layers import options
from dsa_layers.parallel.ranks import ALONE

GPUS = 8


def shape(model: str, case: str, gpus: int) -> str:
    return f"{model} {case}, one of {gpus} GPUs"


def rows(
    clock: Clock,
    gpus: int = GPUS,
    models: Sequence[str] = tuple(STACKS),
    runs: Collection[str] | None = None,
    layers: int | None = None,
    done: Collection[str] = (),
    tell: Tell = lambda step: None,
) -> Iterator[Row]:
    """{"shape", "model", "run", "gpus", "layers", "published_layers", "tokens", "shard_ms", "memory", "ms", "figure"}
    of the first of so many GPUs; not of prompts that are computed once. clock: of one process; the rest as of
    `parallel_rows.rank_rows`. ms is shard_ms."""
    ranks = SilentRanks(0, gpus)
    for name in models:
        todo = chosen(name, runs, lambda case, name=name: shape(name, case, gpus) in done)
        todo = [case for case in todo if case.repeats]
        if not todo:
            continue
        most = layers or layers_that_fit(name, gpus, clock.free(), max(case.held for case in todo))
        model = drawn(name, ranks, clock, tell, **with_layers(name, most))
        for case in todo:
            clock.forget_peak()
            with without_collectives(model, ranks):
                times, launching = timed(model, case, clock)
            ms = times.median().item()
            tell(f"{name} {case.name}, {most} layers, one of {gpus}: {ms:.2f} ms, {launching}")
            row = {"shape": shape(name, case.name, gpus), "model": name, "run": case.name, "gpus": gpus}
            row |= {"layers": most, "published_layers": published_layers(name), "tokens": case.tokens}
            yield row | {"shard_ms": ms, "memory": clock.peak(), "ms": ms, "figure": f"{ms:.2f} ms in silence"}
        del model
        free()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m dsa_bench.e2e.one_of_many", description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=options.positive, default=GPUS, metavar="N", help=f"default: {GPUS}")
    parser.add_argument("--models", nargs="+", choices=[*STACKS], default=[*STACKS], help="default: all")
    parser.add_argument("--runs", nargs="+", choices=names(), metavar="RUN", help=f"of {', '.join(names())}")
    parser.add_argument("--layers", type=options.positive, metavar="N", help="default: as many as fit")
    args = parser.parse_args(arguments)
    if reason := backends.why_no_kernels():
        parser.error(f"a benchmark needs a GPU with kernels: {reason}")
    clock = Clock(ALONE, torch.device("cuda", torch.cuda.current_device()))
    tell = seconds_told()
    prepare(args.models, args.runs, args.gpus, tell)
    for row in rows(clock, args.gpus, args.models, args.runs, args.layers, tell=tell):
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
