"""Helpers for tests of grouped GEMMs with invalid `ends`, invalid row numbers, or unused rows.

Matrix e has the rows from ends[e - 1] (0 for the first matrix) to ends[e] - 1. Unused rows are the rows from the last
end on, as in a process with only some of a model's experts. Their contents affect no result, and no kernel writes
results for them.
"""

import itertools

import pytest
import torch

from dsa.testing import poison_free_memory
from tests.gpu.attention import int32, no_keys
from tests.gpu.op_checks import assert_same_bits, captured, flat

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
by_dtype = pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
# (ends, {matrix: (first row, end of rows)}) of four matrices over 64 rows. Only these rows have defined results.
ENDS = [
    ([10, 5, 200, 300], {0: (0, 10)}),
    ([-5, 10, 2**31 - 1, 64], {}),
    ([-(2**31), 2**31 - 1, 20, 64], {3: (20, 64)}),
    ([64, 0, 0, 0], {0: (0, 64)}),
    ([10, 20, 30, 2**31 - 1], {0: (0, 10), 1: (10, 20), 2: (20, 30), 3: (30, 64)}),
    ([10, 10, 17, 33], {0: (0, 10), 2: (10, 17), 3: (17, 33)}),
    ([3, 17, 40, 40], {0: (0, 3), 1: (3, 17), 2: (17, 40)}),
    ([9, 9, 9, 9], {0: (0, 9)}),
    ([0, 0, 1, 1], {2: (0, 1)}),
    ([0, 0, 0, 0], {}),
]
# Rows of each of four matrices, for tests with unused rows.
SIZES = [[0, 0, 0, 0], [5, 0, 0, 0], [3, 40, 0, 0], [0, 0, 1, 0], [130, 0, 300, 77]]
UNUSED = [1, 63, 1500, 5000]
# `with_unused_rows` gives these rows invalid row numbers. Every test has at least 64 rows.
OUTSIDE = [37, 50, 58, 61]


def ends_of(sizes):
    return int32([*itertools.accumulate(sizes)])


def name(value):
    return f"{len(value)} of {sum(value)}" if isinstance(value, list) and len(value) > 8 else str(value)[:80]


def operands(case, rows, matrices, **sizes):
    given = case.arguments("cuda", sizes=[rows, *[0] * (matrices - 1)], **sizes)
    return given["a"], given["b"]


def rows_of(x, rows):
    """Return x[rows] bit for bit, for any dtype."""
    return x.contiguous().view(torch.uint8)[rows].view(x.dtype)


def rows_of_matrices(*more_sizes):
    """Return a list of (ends, {matrix: (first row, end of rows)}, number of rows). The entries of ENDS come first. Then
    each list in SIZES and `more_sizes` gives an entry with 300 unused rows."""
    cases = [(ends, rows, 64) for ends, rows in ENDS]
    for sizes in (*SIZES, *more_sizes):
        ends = list(itertools.accumulate(sizes))
        rows = {e: (end - size, end) for e, (size, end) in enumerate(zip(sizes, ends)) if size}
        cases.append((ends, rows, ends[-1] + 300))
    return cases


def untouched(rows, columns, dtype):
    """A later check recognises memory that was not written by these bytes of 7."""
    return torch.full((rows, columns * dtype.itemsize), 7, dtype=torch.uint8, device="cuda").view(dtype)


def with_unused_rows(product, a, b, spans):
    """Return (a with NaN in unused rows, mixed, numbers, weights, expected results).

    product           (rows of a, one matrix of b, weights of the rows) -> the results of these rows
    spans             {matrix: (first row, end of rows)}
    mixed             the rows of a in another order
    numbers           index in mixed of each row of a; a number outside a for unused rows and the rows OUTSIDE
    weights           one weight per row of a; NaN in unused rows
    expected results  results of `product`; bytes of 7 in unused rows
    """
    count, unused = len(a[0]), torch.ones(len(a[0]), dtype=torch.bool, device="cuda")
    weights, order = torch.rand(count, device="cuda") - 0.5, torch.randperm(count, device="cuda")
    one_row = flat(product(tuple(x[:1] for x in a), tuple(x[0] for x in b), weights[:1]))
    expected = [untouched(count, x.shape[1], x.dtype) for x in one_row]
    for e, (begin, end) in spans.items():
        unused[begin:end] = False
        found = product(tuple(x[begin:end] for x in a), tuple(x[e] for x in b), weights[begin:end])
        for result, rows in zip(expected, flat(found), strict=True):
            result[begin:end] = rows
    q, s = a[0].view(torch.uint8).clone(), a[1].clone()
    q[unused], s[unused], weights[unused] = 0x7F, torch.nan, torch.nan
    a = q.view(a[0].dtype), s
    numbers = torch.where(unused, no_keys(count).repeat(count)[:count], order).int()
    numbers[OUTSIDE] = no_keys(count)[: len(OUTSIDE)]
    return a, tuple(rows_of(x, order.argsort()) for x in a), numbers, weights, expected


def check_written(write, *expected, spare=0, has_outside=False):
    """Check that write(*results) writes the expected results, except rows that are bytes of 7 in `expected`.

    spare        columns between a row of a result and the next row in memory
    has_outside  whether the results of the rows OUTSIDE are undefined
    """
    wholes = [untouched(len(x) + 128, x.shape[1] + spare, x.dtype) for x in expected]
    results = [whole[64:-64, : x.shape[1]] for whole, x in zip(wholes, expected)]
    write(*results)
    for row in OUTSIDE if has_outside else ():
        for result, right in zip(results, expected):
            result[row] = right[row]
    assert_same_bits(results, expected)
    for result, whole, x in zip(results, wholes, expected):
        result.copy_(untouched(*x.shape, x.dtype))
        assert whole.view(torch.uint8).eq(7).all()


def with_nan_rows(x, count):
    rows = torch.full((count, *x.shape[1:]), torch.nan, device=x.device).to(x.dtype)
    return torch.cat((x.view(torch.uint8), rows.view(torch.uint8))).view(x.dtype)


def check_expected_rows(op, a, b, sizes, unused, weighted=True, **options):
    """Check that neither unused rows nor expected_rows change a bit of the results of used rows. expected_rows decides
    which kernel runs, so this also compares the kernels."""
    used, ends = sum(sizes), ends_of(sizes)
    count, longer = used + unused, tuple(with_nan_rows(x, unused) for x in a)
    outside = no_keys(used).repeat(unused // 6 + 1)[:unused]
    kinds = [{}, {"rows": torch.cat((torch.randperm(used, device="cuda").int(), outside))}]
    if weighted:
        factors = with_nan_rows(torch.rand(used, device="cuda"), unused)
        kinds += [kind | {"weights": factors} for kind in kinds]
    for kind in kinds:
        expected = flat(op(a, b, ends, **{name: x[:used] for name, x in kind.items()}, **options))
        for number in {0, 1, 64, 65, 96, 97, used, 1024, 4096, 4097, count} & {*range(count + 1)}:
            poison_free_memory(mebibytes=16)
            got = flat(op(a if "rows" in kind else longer, b, ends, expected_rows=number, **kind, **options))
            assert all(len(x) == count for x in got)
            assert_same_bits([x[:used] for x in got], expected)


def check_replays_with_fewer_rows(op, a, b, expected_of, keeps_unused=True, **options):
    """Check that replays of a captured op(a, b, ends) follow new ends. With `keeps_unused`, replays must not write
    unused rows.

    expected_of: (rows of a, sizes) -> results
    """
    count = len(a[0])
    ends = ends_of([count, 0, 0, 0])
    graph, results = captured(op, a, b, ends, **options)
    for sizes in ([count, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0], [7, 0, count // 2, 5], [0, 0, 0, count]):
        used = sum(sizes)
        ends.copy_(ends_of(sizes))
        for x in flat(results):
            x.view(torch.uint8).fill_(7)
        graph.replay()
        assert_same_bits([x[:used] for x in flat(results)], expected_of(tuple(x[:used] for x in a), sizes))
        assert not keeps_unused or all(x[used:].view(torch.uint8).eq(7).all() for x in flat(results)), sizes
