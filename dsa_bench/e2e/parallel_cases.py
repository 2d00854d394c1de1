"""What is timed of models on several GPUs: one prompt, and one token for each of some sequences."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from dsa_bench.e2e.report import CHUNK
from dsa_bench.e2e.runs import Model, Run, decode, prefill
from dsa_bench.e2e.stacks import STACKS
from dsa_layers.families.published import published_config

# Tokens of a prompt, and how often it is timed: 0 is once and for all, since it takes a minute.
PROMPTS = {4096: 10, 32768: 3, 131072: 1, 1048576: 0}
SEQUENCES, CONTEXT = (1, 8, 32, 128, 256), 8192
STEP_REPEATS = 20


@dataclass(frozen=True)
class Case:
    """tokens: that a pass computes; held: tokens in the cache at its end; repeats: how often it is timed; 0 of what is
    computed once, without a pass before it and without comparisons."""

    name: str
    tokens: int
    held: int
    repeats: int
    make: Callable[[Model], Run]


def cases(model: str) -> list[Case]:
    """Those of a published model, whose context bounds its prompts."""
    context = published_config(STACKS[model][0])["max_position_embeddings"]
    prompts = [_prompt(tokens) for tokens in PROMPTS if tokens <= context]
    return [*prompts, *(_step(count) for count in SEQUENCES)]


def chosen(model: str, runs: Collection[str] | None, is_done: Callable[[str], bool]) -> list[Case]:
    """Those of a model that are left to do, of all or of `runs`, by their names."""
    return [case for case in cases(model) if (runs is None or case.name in runs) and not is_done(case.name)]


def names() -> list[str]:
    """Of the cases of all models."""
    return list(dict.fromkeys(case.name for model in STACKS for case in cases(model)))


def _prompt(tokens: int) -> Case:
    make = partial(prefill, count=1, tokens=tokens, chunk=CHUNK)
    return Case(f"prefill {tokens}", tokens, tokens, PROMPTS[tokens], make)


def _step(count: int) -> Case:
    make = partial(decode, count=count, context=CONTEXT)
    return Case(f"decode {count} x {CONTEXT}", count, count * CONTEXT, STEP_REPEATS, make)
