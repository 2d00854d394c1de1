"""Limits that kernels of several families share."""

MAX_SLOTS = 2**31  # slots of a paged cache: kernels divide slots in 32 bits
