"""Limits of the kernel that rotates heads and casts them to FP8, as plain numbers. Kernels, bridges and tests read
them."""

ROTARY_MULTIPLE = 8  # the number of rotated channels is a multiple of this
