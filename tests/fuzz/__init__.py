"""Random tests of wrong and unusual arguments.

One to three arguments of a valid call (a case of `dsa.cases`) are changed. The op must then return results that pass
the checks of judge.py, or raise a ValueError or TypeError that names one of the changed arguments. The seed and the
number of a fuzz case determine its call and changes. Environment variables: DSA_FUZZ_SEED is the seed, DSA_FUZZ_CASES
the number of fuzz cases, and DSA_FUZZ_CASE the number of a single fuzz case to run.
"""

import os
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dsa.cases import CASES
from dsa.cases.case import Case
from tests.fuzz.changes import Change, change
from tests.fuzz.judge import judge

SEED = int(os.environ.get("DSA_FUZZ_SEED", "20"))


def numbers(shard: int, shards: int, count: int) -> list[int]:
    """Return the numbers of this shard's fuzz cases, below DSA_FUZZ_CASES or, by default, `count`. With DSA_FUZZ_CASE,
    only that fuzz case runs, in one shard."""
    one = os.environ.get("DSA_FUZZ_CASE")
    wanted = [int(one)] if one else range(int(os.environ.get("DSA_FUZZ_CASES", count)))
    return [number for number in wanted if number % shards == shard]


@dataclass(frozen=True)
class Mutation:
    call: Case
    arguments: dict[str, Any]
    changes: dict[str, Change]

    def __str__(self) -> str:
        return f"{self.call.name} with " + ", ".join(f"{name}: {x.what}" for name, x in self.changes.items())


def make_mutation(number: int, device: str) -> Mutation:
    rng = random.Random(f"{SEED}/{number}")
    call = rng.choice(CASES)
    arguments = call.arguments(device)
    names = rng.sample([*arguments], min(len(arguments), rng.choice((1, 1, 2, 3))))
    changes = {name: change(rng, arguments[name], device) for name in names}
    return Mutation(call, {**arguments, **{name: x.value for name, x in changes.items()}}, changes)


def failures(wanted: Iterable[int], device: str) -> list[str]:
    found = []
    for number in wanted:
        case = make_mutation(number, device)
        problem = judge(case.call, case.arguments, case.changes, device)
        if problem:
            found.append(f"DSA_FUZZ_SEED={SEED} DSA_FUZZ_CASE={number}: {case}: {problem}")
    return found
