"""What is timed of models on several GPUs, one prompt or one token for each of some sequences, and the kernels for
it."""

import argparse
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from dsa.runtime.variants import Variant
from dsa_bench.e2e.command import asked_of, in_order
from dsa_bench.e2e.report import CHUNK
from dsa_bench.e2e.runs import Model, Run, decode, prefill
from dsa_bench.e2e.silent import SilentRanks, without_collectives
from dsa_bench.e2e.stacks import STACKS, skeleton
from dsa_layers import options
from dsa_layers.cache.cache import Cache
from dsa_layers.compilation import passes
from dsa_layers.families.model import CheckpointModel
from dsa_layers.families.published import published_config
from dsa_layers.parallel.ranks import ALONE, Ranks
from dsa_layers.parallel.split import split

# Tokens of a prompt, and how often it is timed. 0: once, without a warm-up, since it takes a minute.
PROMPTS = {4096: 10, 32768: 3, 131072: 1, 1048576: 0}
SEQUENCES, CONTEXT = (1, 8, 32, 128, 256), 8192
STEP_REPEATS = 20


@dataclass(frozen=True)
class Case:
    """tokens: computed by a pass. held: tokens in the cache at its end. repeats: how often it is timed; 0: once,
    without a warm-up and without comparisons."""

    name: str
    tokens: int
    held: int
    repeats: int
    make: Callable[[Model], Run]


def cases(model: str) -> list[Case]:
    """The cases of a published model, whose context bounds its prompts."""
    context = published_config(STACKS[model][0])["max_position_embeddings"]
    prompts = [_prompt(tokens) for tokens in PROMPTS if tokens <= context]
    return [*prompts, *(_step(count) for count in SEQUENCES)]


def chosen(model: str, runs: Collection[str] | None, is_done: Callable[[str], bool]) -> list[Case]:
    """The cases of a model that are not done, of all or of those named in `runs`."""
    return [case for case in cases(model) if (runs is None or case.name in runs) and not is_done(case.name)]


def names() -> list[str]:
    """The names of all models' cases."""
    return list(dict.fromkeys(case.name for model in STACKS for case in cases(model)))


def _prompt(tokens: int) -> Case:
    make = partial(prefill, count=1, tokens=tokens, chunk=CHUNK)
    return Case(f"prefill {tokens}", tokens, tokens, PROMPTS[tokens], make)


def _step(count: int) -> Case:
    make = partial(decode, count=count, context=CONTEXT)
    return Case(f"decode {count} x {CONTEXT}", count, count * CONTEXT, STEP_REPEATS, make)


def add_options(parser: argparse.ArgumentParser) -> None:
    """--runs and --layers."""
    parser.add_argument("--runs", nargs="+", choices=names(), metavar="RUN", help=f"of {', '.join(names())}")
    parser.add_argument("--layers", type=options.positive, metavar="N", help="of split models (default: all that fit)")


def asked(models: Sequence[str], runs: Collection[str] | None, gpus: int) -> list[Variant]:
    """The kernels that passes of the models ask for, split over so many GPUs and on one; sorted."""
    todo = {name: chosen(name, runs, lambda case: False) for name in models}
    parts = (SilentRanks(0, gpus), ALONE)
    return in_order(asked_of_part(name, ranks, todo[name]) for name in models if todo[name] for ranks in parts)


def asked_of_part(name: str, ranks: Ranks, todo: Sequence[Case]) -> set[Variant]:
    """Those of a rank's part of a stack."""
    model = skeleton(name)
    split(model, ranks, blocks=True)

    def all_passes(model: CheckpointModel, cache: Cache) -> None:
        with without_collectives(model, ranks):
            for case in todo:
                if case.name.startswith("decode"):
                    passes.decode(model, cache, case.tokens, CONTEXT)
                    continue
                # The last passes of a long prompt are alike.
                for begin in {*range(0, min(case.tokens, 8 * CHUNK), CHUNK), max(case.tokens - CHUNK, 0)}:
                    passes.prefill(model, cache, [(min(CHUNK, case.tokens - begin), begin)])

    return asked_of(model, max(case.held for case in todo), 1024, all_passes)
