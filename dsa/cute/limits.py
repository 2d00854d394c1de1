"""Limits that kernels of several families share."""

MAX_SLOTS = 2**31  # slots of a paged cache: slots are int32, and kernels find a slot's page by a 32-bit division
