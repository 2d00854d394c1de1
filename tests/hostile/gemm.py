"""Index tensors of products and of casts: where the rows of a weight end, which rows, and where they go."""

from collections.abc import Callable
from functools import partial

import torch

import dsa
from tests.hostile import IndexArgument, Prepared, Results
from tests.hostile.places import int32, randn, rows_but

E4M3 = torch.float8_e4m3fn
PAGE = 64


def products(device: str) -> Prepared:
    ends = [10, 70, 70, 90]
    a = randn(90, 256, device=device).to(E4M3), torch.rand(90, 2).to(device)
    b = randn(4, 136, 256, device=device).to(E4M3), torch.rand(4, 2, 2).to(device)

    def run(given: torch.Tensor) -> Results:
        return [dsa.grouped_fp8_gemm_nt(a, b, given)]

    return Prepared(run, int32(ends, device), places_of(ends))


def places_of(ends: list[int]) -> dict[str, tuple[int, Callable[[Results], Results]]]:
    """Each end, and the rows that are of neither weight beside it."""
    begins = [0, *ends]
    parts = [range(begins[e], begins[min(e + 2, len(ends))]) for e in range(len(ends))]
    return {f"end {e}": (e, rows_but(part)) for e, part in enumerate(parts)}


def of_experts(op: str, device: str, tokens: int, count: int, ends: list[int], argument: str) -> Prepared:
    """A call of an op of experts with `count` rows of so many tokens, which are named: `argument` is "ends" or "rows";
    count 0: with the tokens as they are. Rows behind the last end are nobody's, and no result is expected there."""
    a = randn(tokens, 256, device=device).to(E4M3), torch.rand(tokens, 2).to(device)
    matrices = len(ends)
    b = randn(matrices, 256, 256, device=device).to(E4M3), torch.rand(matrices, 2, 2).to(device)
    if "fp4" in op:
        packed = torch.randint(-128, 128, (matrices, 256, 128), dtype=torch.int8).to(device)
        scale = torch.randint(120, 128, (matrices, 256, 8), dtype=torch.uint8).to(device).view(torch.float8_e8m0fnu)
        b = packed, scale, dsa.fp4_block_scales(packed, scale)
    named = {"rows": torch.randint(0, tokens, (count,)).to(torch.int32).to(device)} if count else {}
    arguments = {"ends": int32(ends, device)} | named

    def run(given: torch.Tensor) -> Results:
        found = getattr(dsa, op)(a, b, **(arguments | {argument: given}))
        return [x[: ends[-1]] for x in (found if isinstance(found, tuple) else [found])]

    of_rows = {f"row {m}": (m, rows_but([m])) for m in (0, ends[0] - 1, ends[0], count - 1)}
    return Prepared(run, arguments[argument], places_of(ends) if argument == "ends" else of_rows)


def scattering(device: str) -> Prepared:
    """Each token goes to two rows."""
    x, valid = randn(12, 256, device=device), torch.randperm(24).view(12, 2)

    def run(given: torch.Tensor) -> Results:
        return dsa.scatter_cast_to_fp8(x, given)

    places = {f"token {t}": ((t, t % 2), rows_but([int(valid[t, t % 2])])) for t in (0, 5, 11)}
    return Prepared(run, valid.to(torch.int32).to(device), places)


OF_EXPERTS = (
    "grouped_fp8_gemm_nt",
    "grouped_fp8_fp4_gemm_nt",
    "grouped_fp8_gemm_swiglu",
    "grouped_fp8_fp4_gemm_swiglu",
)

# What the kernels do with rows: gather them; draw work tiles, where there are many; copy more rows than they gather.
# And kernels of their own have few rows, of FP4 weights gathered ones too. In some calls there are rows behind those of
# the last weight.
CALLS = {
    "few": (60, 0, [10, 30, 30, 41], ("ends",)),
    "few of many": (50, 90, [10, 30, 30, 41], ("ends", "rows")),
    "gathering": (50, 90, [10, 70, 70, 90], ("ends", "rows")),
    "gathering more": (50, 300, [100, 100, 170, 300], ("ends", "rows")),
    "drawing": (1200, 0, [300, 300, 1150, 1200], ("ends",)),
    "drawing few of many": (1200, 0, [30, 30, 230, 301], ("ends",)),
    "copying": (50, 4200, [1000, 4200], ("ends", "rows")),
    "copying few of many": (50, 4200, [100, 333], ("ends", "rows")),
}

ARGUMENTS: list[IndexArgument] = [
    IndexArgument("scatter_cast_to_fp8", "places", scattering),
    IndexArgument("grouped_fp8_gemm_nt", "ends", products),
    *(
        IndexArgument(
            f"{op} {name}",
            argument,
            partial(of_experts, op, tokens=tokens, count=count, ends=ends, argument=argument),
        )
        for op in OF_EXPERTS
        for name, (tokens, count, ends, arguments) in CALLS.items()
        for argument in arguments
    ),
]
