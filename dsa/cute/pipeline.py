"""Position in a ring of pipeline stages: a stage number and the phase bit to wait for.

A parity wait tells a phase from the one before it, not from the one before that. So whoever waits for a stage's data
must have consumed the stage's last data itself: readers that share a load between them need a ring each, or one that
runs ahead takes the phase before last for the next.
"""

import cutlass.cute as cute


@cute.jit
def advance(stage, phase, stages):
    """The next stage and its phase, by comparison: a division would put a dozen instructions before every wait."""
    wraps = stage == stages - 1
    return 0 if wraps else stage + 1, phase ^ 1 if wraps else phase
