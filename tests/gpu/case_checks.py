"""Helpers that check ops with their cases. A case (see `dsa.cases`) contains an op, makes inputs for the op, and checks
the results."""

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import pytest
import torch

from dsa.cases.case import Case, Given, Results
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import among_nan, assert_equal, assert_same_bits, captured, far_apart

Run = Callable[[Given], Results]
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
by_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def grid(**choices: Iterable[Any]) -> list[dict[str, Any]]:
    """Return sizes (dicts of keyword arguments of `Case.make`), one for every combination of one value per name."""
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def by_sizes(*grids: list[dict[str, Any]]) -> pytest.MarkDecorator:
    found = [sizes for one in grids for sizes in one]
    return pytest.mark.parametrize("sizes", found, ids=lambda sizes: "-".join(map(str, sizes.values()))[:80])


def verify(case: Case, sizes: dict[str, Any], record_error: Callable[[float], None], seed: int = 0) -> None:
    """Check a call and record the error. Free memory is full of NaN, so an element that the kernel does not write is
    NaN."""
    poison_free_memory(mebibytes=64)
    record_error(case.verify("cuda", seed, **sizes))


def check_far_rows(case: Case, given: Given, names: Sequence[str], rows: int) -> None:
    """Check offsets of more than 2^31 elements; `rows` must be large enough for them. Each named argument becomes the
    last rows of a tensor with `rows` rows. The other rows are zeros."""
    far, count = dict(given), len(given[names[0]])
    for name in names:
        far[name] = given[name].new_zeros(rows, *given[name].shape[1:])
        far[name][-count:] = given[name]
    found = case.run(far)
    assert_equal([x[-count:] for x in found], case.run(given))
    assert not found[0][:-count].float().any()


def check_far_pages(case: Case, **sizes: Any) -> None:
    near, far = (case.arguments("cuda", **sizes) for _ in range(2))
    far["cache"] = far_apart(far["cache"])
    assert_same_bits(case.results(far), case.results(near))


def layouts(x: torch.Tensor) -> list[torch.Tensor]:
    """Return tensors with the shape of x in other layouts.

    - every second row of a tensor
    - a row stride of 0: every row is the first row of x
    - with two or more dimensions: dimension 0 exchanged in memory with dimension 1, or with the last dimension
    - with two or more dimensions: columns among NaN. One tensor has rows that do not start at multiples of 16 bytes
    - with a single row: an arbitrary row stride
    """
    found = [torch.stack((x, x), 1)[:, 1], x[:1].expand(x.shape)]
    if x.dim() > 1:
        found += [x.transpose(0, dim).contiguous().transpose(0, dim) for dim in (1, -1)]
        found += [among_nan(x), among_nan(x, 1, 2)]
    if len(x) == 1:
        found.append(x.as_strided(x.shape, (7, *x.stride()[1:])))
    return found


def check_layouts(case: Case, names: Sequence[str], **sizes: Any) -> None:
    """Call the op with each named argument in each of the `layouts`. The results must have the bits of a contiguous
    copy. An op may refuse a layout with a ValueError that names the argument."""
    for name in names:
        for i in range(len(layouts(case.arguments("cuda", **sizes)[name]))):
            other, given = (case.arguments("cuda", **sizes) for _ in range(2))
            other[name] = layouts(other[name].detach())[i].requires_grad_(other[name].requires_grad)
            given[name] = other[name].detach().contiguous().requires_grad_(other[name].requires_grad)
            try:
                found = case.results(other)
            except ValueError as error:
                assert name in str(error)
                continue
            assert_same_bits(found, case.results(given))


def check_rows_alone(run: Run, given: Given, names: Sequence[str], parts: Iterable[tuple[int, int]]) -> None:
    """Check that a row's bits do not depend on other rows. names: the arguments that have a row per result row. parts:
    (first row, number of rows) of each separate call"""
    whole = run(given)
    for first, count in parts:
        part = slice(first, first + count)
        found = run(given | {name: given[name][part] for name in names})
        assert_same_bits(found, [x[part] for x in whole])


def spoiled_rows(run: Run, given: Given, changes: dict[tuple, float]) -> Results:
    """Write `changes` {(argument, row, ...): number} into `given`, and return the results. No bit of the other rows may
    change."""
    clean = run(given)
    for (name, *place), number in changes.items():
        given[name][tuple(place)] = number
    found, changed = run(given), {row for _, row, *_ in changes}
    others = [row for row in range(len(clean[0])) if row not in changed]
    assert_same_bits([x[others] for x in found], [x[others] for x in clean])
    return found


def check_calls_in_a_row(case: Case, **sizes: Any) -> None:
    """Check twenty equal calls in one graph. Each must wait for the previous call, because the workspaces of both can
    be in the same memory."""
    given = case.arguments("cuda", **sizes)
    graph, found = captured(lambda: [case.run(given) for _ in range(20)])
    for seed in range(1, 6):
        for name, new in case.arguments("cuda", seed, **sizes).items():
            if isinstance(new, torch.Tensor):
                given[name].copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        for each in found:
            case.check(given, each)
