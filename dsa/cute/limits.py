"""Limits that kernels of several families share, as plain numbers."""

MAX_SLOTS = 2**31  # in a paged cache: slots are int32, and the division that finds a slot's page is a 32-bit division
