"""Loads: prompts that arrive together, sequences that decode together, and mixed traffic."""

import random
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Load:
    """`count` requests with prompts of `length` random tokens, of which each generates `tokens` tokens.

    rate: requests per second with Poisson arrivals; None if all requests arrive at once. repeated: all runs use the
    same prompts. After the first run the engine finds them in the prefix cache.
    """

    name: str
    count: int
    length: int
    tokens: int = 1
    rate: float | None = None
    repeated: bool = False

    def prompts(self, seed: int, vocabulary: int) -> list[list[int]]:
        numbers = random.Random(f"{self.length} prompts" if self.repeated else f"{self.name} {seed}")
        return [[numbers.randrange(10, vocabulary) for _ in range(self.length)] for _ in range(self.count)]

    def arrivals(self, seed: int) -> list[float]:
        """Seconds after which each request arrives."""
        if self.rate is None:
            return [0.0] * self.count
        numbers, time, times = random.Random(f"{self.name} {seed}"), 0.0, []
        for _ in range(self.count):
            times.append(time)
            time += numbers.expovariate(self.rate)
        return times

    def fields(self) -> dict[str, Any]:
        return asdict(self)


PROMPTS = tuple(
    Load(f"prompts {count} x {length}", count, length)
    for count, length in ((1, 4096), (4, 4096), (64, 512), (1, 32768))
)
STEPS = tuple(Load(f"steps of {count}", count, 4096, tokens=96, repeated=True) for count in (1, 8, 32, 128))


def mixed(rate: float) -> Load:
    return Load(f"mixed, {rate:g} requests/s", 48, 2048, tokens=256, rate=rate)
