"""Configurations of the top-k kernel (topk_indices_sm90.py), and the choice among them for each shape."""

from dataclasses import dataclass

BITS = 32  # a thread selects from at most this many numbers, because its mask has 32 bits, one per number


@dataclass(frozen=True)
class TopkConfig:
    """threads: threads per CTA. capacity: entries of a CTA's list of candidates, 8 bytes each; a resident row uses the
    list's memory. tile: numbers per thread in a tile of a streamed row. 0: the configuration accepts only resident
    rows, which fit in shared memory. stages: tiles in flight. cluster: CTAs per row."""

    threads: int
    capacity: int
    tile: int = 0
    stages: int = 1
    cluster: int = 1

    def resident_vectors(self, width: int) -> int:
        """Return the largest number of 16-byte vectors that a resident row of `width`-bit numbers can overlap; 0 for
        clusters, which stream every row."""
        return min(self.threads * BITS * width // 128, self.capacity // 2) if self.cluster == 1 else 0

    def takes(self, k: int) -> bool:
        return k <= (self.capacity // 2 if self.tile else self.capacity)


RESIDENT = (TopkConfig(256, 4096), TopkConfig(512, 8192))
STREAMING = (TopkConfig(256, 4096, 32, 2), TopkConfig(512, 8192, 16, 2))
# For rows of more than 2048 vectors, if there are at most as many rows as SMs: eight, four, two or one CTAs per row.
CLUSTERS = (*(TopkConfig(512, 8192, 16, 3, c) for c in (8, 4, 2)), TopkConfig(1024, 8192, 8, 3))
CONFIGS = RESIDENT + STREAMING + CLUSTERS


def choose_config(rows: int, vectors: int, k: int, width: int, sms: int) -> TopkConfig:
    """Return the configuration that was fastest in measurements for this shape. A row of `width`-bit scores overlaps up
    to `vectors` vectors of 16 bytes."""
    if rows > sms:
        candidates = RESIDENT + STREAMING
    elif vectors <= 2048:
        candidates = RESIDENT[1:]
    else:
        candidates = tuple(
            c for c in CLUSTERS if c.cluster * rows <= sms and (c.cluster == 1 or vectors >= 1024 * c.cluster)
        )
    return next(c for c in candidates if c.takes(k) and (c.tile or vectors <= c.resident_vectors(width)))
