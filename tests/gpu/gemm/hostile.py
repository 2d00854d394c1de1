"""Ends of matrices that no router gives, and numbers of rows: kernels have to get them all the same. And ends that
leave rows to nobody, as those of a process that holds some of a model's experts."""

import itertools

import torch

from dsa.testing import poison_free_memory
from tests.gpu.op_checks import assert_same_bits, captured, flat

# Of four matrices and 64 rows: their ends, and {matrix: the rows that are its}.
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
# Of 90 rows.
ROWS = [-1, -(2**31), 2**31 - 1, 90, 2**31 - 64]
# Rows of each matrix where others follow, which are nobody's: none of any; of the first alone; of all but the last; one
# row; of all.
SIZES = [[0, 0, 0, 0], [5, 0, 0, 0], [3, 40, 0, 0], [0, 0, 1, 0], [130, 0, 300, 77]]
BEHIND = [1, 63, 1500, 5000]


def ends_of(sizes):
    return torch.tensor(sizes, device="cuda").cumsum(0, dtype=torch.int32)


def name(value):
    """Of a parameter; of long ones it tells how many they are."""
    return f"{len(value)} of {sum(value)}" if isinstance(value, list) and len(value) > 8 else str(value)[:80]


def rows_of_matrices(*more_sizes):
    """(ends, {matrix: the rows that are its}, number of rows) of ENDS, and of SIZES and `more_sizes`, with 300 rows
    that follow the last end."""
    cases = [(ends, rows_of, 64) for ends, rows_of in ENDS]
    for sizes in (*SIZES, *more_sizes):
        ends = list(itertools.accumulate(sizes))
        rows_of = {e: (end - size, end) for e, (size, end) in enumerate(zip(sizes, ends)) if size}
        cases.append((ends, rows_of, ends[-1] + 300))
    return cases


def with_nobodys_rows(a, rows_of):
    """-> a copy of `a`, numbers of its rows and weights of 1; where no matrix has a row, these are NaN, no row and
    NaN."""
    count = len(a[0])
    nobodys = torch.ones(count, dtype=torch.bool, device="cuda")
    for begin, end in rows_of.values():
        nobodys[begin:end] = False
    q, s = a[0].view(torch.uint8).clone(), a[1].clone()
    q[nobodys], s[nobodys] = 0x7F, torch.nan
    no_rows = torch.tensor(ROWS, device="cuda").repeat(count)[:count]
    numbers = torch.where(nobodys, no_rows, torch.arange(count, device="cuda")).int()
    return (q.view(a[0].dtype), s), numbers, torch.ones(count, device="cuda").masked_fill(nobodys, torch.nan)


def untouched(rows, columns, dtype):
    """A result of which nothing is written yet."""
    return torch.full((rows, columns * dtype.itemsize), 7, dtype=torch.uint8, device="cuda").view(dtype)


def write_products(product, a, b, rows_of, *results):
    """Write product(rows of a matrix, matrix) into the rows of each matrix."""
    for e, (begin, end) in rows_of.items():
        found = flat(product(tuple(x[begin:end] for x in a), tuple(x[e] for x in b)))
        for result, rows in zip(results, found, strict=True):
            result[begin:end] = rows


def check_written(write, *expected):
    """write(*results) gives the expected ones, and leaves the memory around them as it is."""
    wholes = [untouched(len(x) + 128, x.shape[1], x.dtype) for x in expected]
    write(*(x[64:-64] for x in wholes))
    assert_same_bits([x[64:-64] for x in wholes], expected)
    assert all(x[part].view(torch.uint8).eq(7).all() for x in wholes for part in (slice(64), slice(-64, None)))


def check_expected_rows(op, a, b, sizes, behind, weighted=True, **options):
    """Whatever stands behind the last end, and however many rows are expected, from far too few to all: the others'
    bits are those of the call without them. So they are of every kernel that the op takes."""
    used, ends = sum(sizes), ends_of(sizes)
    count = used + behind
    order, factors = torch.randperm(used, device="cuda", dtype=torch.int32), torch.rand(used, device="cuda")
    more, numbers = tuple(with_nan_behind(x, behind) for x in a), with_no_rows_behind(order, behind)
    more_factors = {"weights": with_nan_behind(factors, behind)}
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


def check_replays_with_fewer_rows(op, a, b, expected_of, nobodys_are_kept=True, **options):
    """A captured op(a, b, ends) follows the ends of four matrices; rows that are nobody's in a replay keep what they
    had. expected_of: (rows of a, sizes) -> results."""
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
        if nobodys_are_kept:
            assert all(x[used:].view(torch.uint8).eq(7).all() for x in flat(results)), sizes


def with_nan_behind(x, count):
    """x and `count` rows more, of NaN."""
    if x.element_size() > 1:
        return torch.cat((x, x.new_full((count, *x.shape[1:]), torch.nan)))
    behind = torch.full((count, *x.shape[1:]), 0x7F, dtype=torch.uint8, device=x.device)
    return torch.cat((x.view(torch.uint8), behind)).view(x.dtype)


def with_no_rows_behind(rows, count):
    """Numbers of rows and `count` more, of no row."""
    return torch.cat((rows, rows.new_tensor(ROWS).repeat(count // len(ROWS) + 1)[:count]))
