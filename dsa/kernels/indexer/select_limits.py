"""Limits of the kernels that score and select, in addition to those in limits.py."""

MAX_SELECTED = 2048  # k
TWO_OPS_KEYS = 8192  # up to this many keys, a query's scores take no more memory than a list
