"""What no router gives: ends of matrices, and numbers of rows. Kernels have to get them all the same."""

# Of four matrices and 64 rows: their ends, and {matrix: the rows that are its}.
ENDS = [
    ([10, 5, 200, 300], {0: (0, 10)}),
    ([-5, 10, 2**31 - 1, 64], {}),
    ([-(2**31), 2**31 - 1, 20, 64], {3: (20, 64)}),
    ([64, 0, 0, 0], {0: (0, 64)}),
    ([10, 20, 30, 2**31 - 1], {0: (0, 10), 1: (10, 20), 2: (20, 30), 3: (30, 64)}),
    ([10, 10, 17, 33], {0: (0, 10), 2: (10, 17), 3: (17, 33)}),
]
# Of 90 rows.
ROWS = [-1, -(2**31), 2**31 - 1, 90, 2**31 - 64]
