"""Ends of matrices that no router gives, and numbers of rows: kernels have to get them all the same. And ends that
leave rows to nobody, as those of a process that holds some of a model's experts."""

import torch

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


def with_nan_behind(x, count):
    """x and `count` rows more, of NaN."""
    if x.element_size() > 1:
        return torch.cat((x, x.new_full((count, *x.shape[1:]), torch.nan)))
    behind = torch.full((count, *x.shape[1:]), 0x7F, dtype=torch.uint8, device=x.device)
    return torch.cat((x.view(torch.uint8), behind)).view(x.dtype)


def with_no_rows_behind(rows, count):
    """Numbers of rows and `count` more, of no row."""
    return torch.cat((rows, rows.new_tensor(ROWS).repeat(count // len(ROWS) + 1)[:count]))
