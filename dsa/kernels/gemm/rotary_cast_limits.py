"""What the kernel that rotates heads and casts them takes, in plain numbers; read by kernels, bridges and tests."""

ROTARY_MULTIPLE = 8  # of channels that turn
