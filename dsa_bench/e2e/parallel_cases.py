"""What is timed of models on several GPUs: one prompt, and one token for each of some sequences."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dsa_bench.e2e.report import CHUNK
from dsa_bench.e2e.runs import Model, Run, decode, prefill
from dsa_bench.e2e.stacks import STACKS
from dsa_layers.families.published import published_config

PROMPTS = (4096, 32768, 131072, 1048576)
SEQUENCES, CONTEXT = (1, 8, 32, 128, 256), 8192
LONG = 200000  # tokens of a prompt from which on it is computed once and for all, since it takes a minute
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


def names() -> list[str]:
    """Of the cases of all models."""
    return list(dict.fromkeys(case.name for model in STACKS for case in cases(model)))


def _prompt(tokens: int) -> Case:
    repeats = 0 if tokens > LONG else 10 if tokens <= CHUNK else 3 if tokens <= 4 * CHUNK else 1
    return Case(f"prefill {tokens}", tokens, tokens, repeats, partial(prefill, count=1, tokens=tokens, chunk=CHUNK))


def _step(count: int) -> Case:
    make = partial(decode, count=count, context=CONTEXT)
    return Case(f"decode {count} x {CONTEXT}", count, count * CONTEXT, STEP_REPEATS, make)
