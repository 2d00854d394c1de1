"""What kernels of several families take, in plain numbers."""

MAX_SLOTS = 2**31  # of a paged cache: its slots are int32, and the division that finds a slot's page is one of 32 bits
