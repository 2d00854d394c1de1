"""What the kernels of scores and selection take, beside what limits.py says of scores."""

MAX_SELECTED = 2048  # k
TWO_OPS_KEYS = 8192  # up to which the scores of a query take no more memory than a list
