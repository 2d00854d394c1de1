"""Slots of new tokens, of all keys, of entries and of rings, beside the same by plain torch operations: bytes a
second."""

from functools import cache, partial

import torch

import dsa
from dsa.reference.cache import slot_mapping as reference
from dsa.testing import copy_bandwidth
from dsa_bench.harness.case import Call, Case

# what; sequences; tokens of each, of which the cache has as many before them
SHAPES = [
    ("tokens", 1, 16384),
    ("tokens", 16, 1024),
    ("all keys", 16, 8192),
    ("tokens", 64, 1),
    ("tokens", 512, 1),
    ("entries", 64, 1),
    ("ring", 64, 1),
]
PAGE, RATIO, WINDOW = 64, 4, 128
_FRESH = 16  # inputs in a graph
_ceiling = cache(copy_bandwidth)


def _arguments(what: str, sequences: int, tokens: int) -> tuple:
    """With the options as `torch.ops.dsa.slot_mapping` takes them."""
    pages = 1 if what == "ring" else -(-2 * tokens // PAGE)
    table = torch.randperm(sequences * pages, device="cuda").int().view(sequences, pages)
    bounds = torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * tokens
    lengths = None if what == "all keys" else torch.full_like(bounds[1:], 2 * tokens)
    page_size = WINDOW if what == "ring" else PAGE
    return table, bounds, lengths, sequences * tokens, page_size, RATIO if what == "entries" else 1, what == "ring"


def _call(function, *arguments) -> Call:
    *positional, ratio, ring = arguments
    return partial(function, *positional, ratio=ratio, ring=ring)


def case(what: str, sequences: int, tokens: int) -> Case:
    inputs = [_arguments(what, sequences, tokens) for _ in range(_FRESH)]
    functions = {"dsa": dsa.slot_mapping, "torch": reference.slot_mapping}
    calls: dict[str, list[Call]] = {who: [_call(f, *i) for i in inputs] for who, f in functions.items()}

    def figure(ms: float) -> str:
        rate = 8 * sequences * tokens / (ms * 1e-3)
        return f"{ms * 1e3:.1f} us, {rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    def check(got: torch.Tensor) -> None:
        if not torch.equal(got, calls["torch"][0]()):
            raise AssertionError("not the reference's slots")

    name = f"{what}, {sequences} sequences of {tokens}"
    return Case(name, calls, figure, check, graph=True, baselines=frozenset({"torch"}))
