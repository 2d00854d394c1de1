"""Position in a ring of pipeline stages."""


def ring(sequence, stages: int):
    """Stage and phase bit of the item with this number, `stages` a power of two. By bits: a signed division would put a
    dozen dependent instructions before every wait."""
    return sequence & (stages - 1), (sequence >> stages.bit_length() - 1) & 1
