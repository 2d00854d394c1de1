"""The slots of new tokens, of all keys or of compressed entries, in pages or in ring buffers: bytes per second,
compared with plain torch operations."""

from functools import partial

import torch

import dsa
from dsa.reference.cache import slot_mapping as reference
from dsa_bench.harness.case import Case, bytes_case

# what; sequences; tokens per sequence. With "all keys" these are all tokens of a sequence. Otherwise they are the new
# tokens of a sequence, before which the same number of tokens is cached.
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


def case(what: str, sequences: int, tokens: int) -> Case:
    page_size = WINDOW if what == "ring" else PAGE

    def inputs() -> tuple:
        pages = 1 if what == "ring" else -(-2 * tokens // PAGE)
        table = torch.randperm(sequences * pages, device="cuda").int().view(sequences, pages)
        bounds = torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * tokens
        lengths = None if what == "all keys" else torch.full_like(bounds[1:], 2 * tokens)
        return table, bounds, lengths, sequences * tokens, page_size

    options = {"ratio": RATIO if what == "entries" else 1, "ring": what == "ring"}
    return bytes_case(
        f"{what}, {sequences} sequences of {tokens}",
        8 * sequences * tokens,
        inputs,
        {"dsa": partial(dsa.slot_mapping, **options), "torch": partial(reference.slot_mapping, **options)},
        most=16,
        baselines={"torch"},
    )
