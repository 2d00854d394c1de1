"""Limits that kernels of several families share."""

MAX_SLOTS = 2**31  # largest number of slots of a paged cache: slots are int32, and kernels divide them in 32 bits
