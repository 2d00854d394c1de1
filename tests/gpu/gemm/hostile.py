"""Ends of matrices and numbers of rows that no router gives, for which kernels must still compute the right rows. Also
ends that leave rows unused: a process with some of a model's experts has such rows."""

import itertools
from functools import partial

import torch

from dsa.testing import poison_free_memory
from tests.gpu.op_checks import assert_same_bits, captured, flat

# Ends of four matrices with 64 rows: (ends, {matrix: (first row, end of rows)}).
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
# Numbers outside 90 rows.
ROWS = [-1, -(2**31), 2**31 - 1, 90, 2**31 - 64]
# Rows of each matrix in tests with unused rows: none, of the first alone, of the first two, one row, of most.
SIZES = [[0, 0, 0, 0], [5, 0, 0, 0], [3, 40, 0, 0], [0, 0, 1, 0], [130, 0, 300, 77]]
UNUSED = [1, 63, 1500, 5000]


def ends_of(sizes):
    return torch.tensor(sizes, device="cuda").cumsum(0, dtype=torch.int32)


def name(value):
    """A parameter's id: of a long list its length and sum."""
    return f"{len(value)} of {sum(value)}" if isinstance(value, list) and len(value) > 8 else str(value)[:80]


def operands(case, rows, matrices, **sizes):
    """(a, b) of a case of grouped products."""
    given = case.arguments("cuda", sizes=[rows, *[0] * (matrices - 1)], **sizes)
    return given["a"], given["b"]


def rows_of(x, rows):
    """x[rows] for any dtype."""
    return x.contiguous().view(torch.uint8)[rows].view(x.dtype)


def rows_of_matrices(*more_sizes):
    """(ends, rows of each matrix, number of rows): ENDS, and SIZES and `more_sizes` with 300 unused rows."""
    cases = [(ends, rows, 64) for ends, rows in ENDS]
    for sizes in (*SIZES, *more_sizes):
        ends = list(itertools.accumulate(sizes))
        rows = {e: (end - size, end) for e, (size, end) in enumerate(zip(sizes, ends)) if size}
        cases.append((ends, rows, ends[-1] + 300))
    return cases


def with_unused_rows(a, rows_of):
    """(a copy of `a`, numbers of its rows, weights of 1). Unused rows have values of NaN, numbers outside, and weights
    of NaN."""
    count = len(a[0])
    unused = torch.ones(count, dtype=torch.bool, device="cuda")
    for begin, end in rows_of.values():
        unused[begin:end] = False
    q, s = a[0].view(torch.uint8).clone(), a[1].clone()
    q[unused], s[unused] = 0x7F, torch.nan
    outside = torch.tensor(ROWS, device="cuda").repeat(count)[:count]
    numbers = torch.where(unused, outside, torch.arange(count, device="cuda")).int()
    return (q.view(a[0].dtype), s), numbers, torch.ones(count, device="cuda").masked_fill(unused, torch.nan)


def untouched(rows, columns, dtype):
    """A result before anything is written: bytes of 7."""
    return torch.full((rows, columns * dtype.itemsize), 7, dtype=torch.uint8, device="cuda").view(dtype)


def write_products(product, a, b, rows_of, *results):
    """Write product(rows of a matrix, matrix) into the rows of each matrix."""
    for e, (begin, end) in rows_of.items():
        found = flat(product(tuple(x[begin:end] for x in a), tuple(x[e] for x in b)))
        for result, rows in zip(results, found, strict=True):
            result[begin:end] = rows


def check_written(write, *expected):
    """write(*results) writes the expected results and no memory around them."""
    wholes = [untouched(len(x) + 128, x.shape[1], x.dtype) for x in expected]
    write(*(x[64:-64] for x in wholes))
    assert_same_bits([x[64:-64] for x in wholes], expected)
    assert all(x[part].view(torch.uint8).eq(7).all() for x in wholes for part in (slice(64), slice(-64, None)))


def check_expected_rows(op, a, b, sizes, unused, weighted=True, **options):
    """Unused rows, and expected_rows from far too few to all, change no bit of the other rows: so every kernel that the
    op may choose gives the same bits."""
    used, ends = sum(sizes), ends_of(sizes)
    count = used + unused
    order, factors = torch.randperm(used, device="cuda", dtype=torch.int32), torch.rand(used, device="cuda")
    outside = order.new_tensor(ROWS).repeat(unused // len(ROWS) + 1)[:unused]
    numbers, more = torch.cat((order, outside)), tuple(with_nan_rows(x, unused) for x in a)
    more_factors = {"weights": with_nan_rows(factors, unused)}
    cases = [(more, {}, {}), (a, {"rows": order}, {"rows": numbers})]
    if weighted:
        cases.append((more, {"weights": factors}, more_factors))
        cases.append((a, {"rows": order, "weights": factors}, {"rows": numbers, **more_factors}))
    for operand, alone, together in cases:
        expected = flat(op(a, b, ends, **alone, **options))
        for number in {0, 1, 64, 65, 96, 97, used, 1024, 4096, 4097, count} & {*range(count + 1)}:
            poison_free_memory(mebibytes=16)
            got = flat(op(operand, b, ends, expected_rows=number, **together, **options))
            assert all(len(x) == count for x in got)
            assert_same_bits([x[:used] for x in got], expected)


def check_numbers_outside(run, writers, rows, wrong):
    """Numbers outside a change no other row of run(), and of what each write(out) writes."""
    expected, bad = run(), torch.zeros(len(rows), dtype=torch.bool, device="cuda")
    bad[[0, 69, 70, 133, -1]] = True
    rows.masked_fill_(bad, wrong)
    assert torch.equal(run()[~bad], expected[~bad])

    def write_right_rows(write, out):
        write(out)
        out[bad] = expected[bad]

    for write in writers:
        check_written(partial(write_right_rows, write), expected)


def with_nan_rows(x, count):
    """x, then `count` rows of NaN."""
    rows = torch.full((count, *x.shape[1:]), torch.nan, device=x.device).to(x.dtype)
    return torch.cat((x.view(torch.uint8), rows.view(torch.uint8))).view(x.dtype)


def check_replays_with_fewer_rows(op, a, b, expected_of, keeps_unused=True, **options):
    """A captured op(a, b, ends) follows new ends of four matrices. Unused rows keep their bytes, if `keeps_unused`.
    expected_of: (rows of a, sizes) -> results."""
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
