"""What the kernel of scores and selection takes, beside what limits.py says of scores."""

MAX_SELECTED = 2048  # k
