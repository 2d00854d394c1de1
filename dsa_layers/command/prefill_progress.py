"""The progress of a long prompt."""

import sys
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:
    from dsa_layers.generation.generator import Generator
    from dsa_layers.generation.results import TokenEvent


class PrefillProgress:
    """A bar of prompt tokens on the standard error, for prompts that need several passes."""

    def __init__(self, prefill_chunk: int) -> None:
        self._chunk = prefill_chunk
        self._bar: tqdm | None = None

    @classmethod
    def of(cls, generator: "Generator") -> "PrefillProgress | None":
        """None where nobody sees a bar."""
        seen = sys.stderr is not None and sys.stderr.isatty()
        return cls(generator.prefill_chunk) if seen else None

    def __call__(self, done: int, total: int) -> None:
        """As `Generator.stream` calls on_prefill."""
        if self._bar is None and total - done > self._chunk:
            self._bar = tqdm(desc="Prefill", total=total, unit=" tokens", leave=False)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)

    def first(self, events: "Iterator[TokenEvent]") -> "list[TokenEvent]":
        """Wait for the first event, and remove the bar: text follows, which it would overwrite."""
        try:
            return list(islice(events, 1))
        finally:
            if self._bar is not None:
                self._bar.close()
