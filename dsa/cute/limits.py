"""Limits of kernels of several families, as plain numbers."""

MAX_SLOTS = 2**31  # of a paged cache: slots are int32, and the division that finds a slot's page has 32 bits
