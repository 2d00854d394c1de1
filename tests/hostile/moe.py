"""Index tensors of experts: which experts, and which rows."""

from collections.abc import Callable
from functools import partial

import torch

import dsa
from tests.hostile import IndexArgument, Prepared, Results
from tests.hostile.places import BOTH, own_row, places, randn

E4M3 = torch.float8_e4m3fn
PAGE = 64


def sorting(device: str, dtype: torch.dtype) -> Prepared:
    experts = torch.randint(0, 4, (40,)).to(dtype).to(device)

    def run(given: torch.Tensor) -> Results:
        return dsa.sort_by_expert(given, 4)

    def rest(i: int) -> Callable[[Results], Results]:
        """Counts of the other experts, and the order within them."""
        kept = experts.long() != experts[i]
        others = [e for e in range(4) if e != int(experts[i])]

        def of(results: Results) -> Results:
            order, rows, ends = (x.long() for x in results)
            begins = torch.nn.functional.pad(ends, (1, 0))[:-1]
            return [
                (ends - begins)[others],
                (rows - begins[experts.long()])[kept],
                order[rows[kept]],
                order.sort().values,
            ]

        return of

    return Prepared(run, experts, places(40, rest))


def combining(device: str, dtype: torch.dtype) -> Prepared:
    y = randn(20, 512, device=device, dtype=torch.bfloat16)
    shared = randn(6, 512, device=device, dtype=torch.bfloat16)
    rows, weights = torch.randint(0, 20, (6, 9)).to(dtype).to(device), torch.rand(6, 9).to(device)

    def run(given: torch.Tensor) -> Results:
        return [dsa.combine_experts(y, given, weights, shared), dsa.combine_experts(y, given, weights)]

    return Prepared(run, rows, own_row(6, 8))


def routing(device: str, argument: str) -> Prepared:
    """Tokens, or the table of their experts: a wrong number is no expert, of its token alone."""
    x, weight = (randn(n, 64, device=device, dtype=torch.bfloat16) for n in (12, 16))
    given = {
        "table": torch.stack([torch.randperm(16)[:3] for _ in range(12)]).to(device),
        "tokens": torch.arange(12).to(device),
    }

    def run(changed: torch.Tensor) -> Results:
        return dsa.route_by_table(x, weight, **given | {argument: changed}, first_expert=4, count=8)

    def rest(i: int) -> Callable[[Results], Results]:
        """The other tokens' experts and weights."""
        others = [t for t in range(12) if t != i]
        return lambda results: [results[0][others], results[1][others]]

    return Prepared(run, given[argument], places(12, rest, 1 if argument == "table" else None))


ARGUMENTS: list[IndexArgument] = [
    *(IndexArgument("sort_by_expert", f"experts {name}", partial(sorting, dtype=x)) for name, x in BOTH.items()),
    *(IndexArgument("combine_experts", f"rows {name}", partial(combining, dtype=x)) for name, x in BOTH.items()),
    *(IndexArgument("route_by_table", name, partial(routing, argument=name)) for name in ("table", "tokens")),
]
