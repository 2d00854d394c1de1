"""Hostile slots for the keys that the indexer writes into its cache. To be moved to the indexer's cases."""

from functools import partial

import torch

import dsa
from dsa.cases.cache import other_tokens, some_slots
from dsa.cases.case import Maker
from tests.hostile import IndexArgument, Prepared, Results
from tests.hostile.places import BOTH, places

TOKENS = 9


def writing(device: str, dtype: torch.dtype) -> Prepared:
    new = Maker(device)
    k, gain, bias, angles = new.bf16(TOKENS, 128), new.positive(128), new.positive(128), new.angles(TOKENS)
    cache, slots = new.index_cache(3, 64, 128), some_slots(new, TOKENS, 3 * 64, dtype)

    def run(given: torch.Tensor) -> Results:
        target = cache.clone()
        dsa.write_indexer_keys(k, gain, bias, *angles.values(), target, given)
        return [target]

    return Prepared(run, slots, places(TOKENS, lambda i: other_tokens({"slots": slots}, (i,), index=True)))


ARGUMENTS = [
    IndexArgument("write_indexer_keys", f"slots {name}", partial(writing, dtype=x)) for name, x in BOTH.items()
]
