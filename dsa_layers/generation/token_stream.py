"""The events of a call, as its reader asks for them."""

import threading
from collections.abc import Callable, Iterator
from types import GeneratorType

from dsa_layers.generation.results import TokenEvent


class TokenStream(Iterator[TokenEvent]):
    """The events of a call of `Generator.stream`, in the order in which their tokens are computed.

    It takes the generator's cache when its first event is asked for. The cache is free again after its last event,
    after an error, after `close`, and when nothing refers to the stream any more. Threads that read one stream get
    different events, one after another. RuntimeError where a pass asks for an event of the stream that runs it.
    """

    def __init__(self, begin: Callable[["TokenStream"], None]) -> None:
        """begin: gives the stream its events, or raises."""
        self._begin = begin
        self._events: GeneratorType | None = None
        self._closed = False
        self._working = threading.Lock()
        self._worker: int | None = None  # the thread that has the lock for an event

    def __next__(self) -> TokenEvent:
        if self._closed:
            raise StopIteration
        if self._worker == threading.get_ident():  # it would wait for itself
            raise RuntimeError("stream: its next event was asked for by the pass that computes it, as a hook may do")
        with self._working:
            self._worker = threading.get_ident()
            try:
                if self._events is None:
                    self._begin(self)
                event = next(self._events)
            finally:
                self._worker = None
        if self._closed:  # by another thread, in the meantime
            self._end()
            raise StopIteration
        return event

    def close(self) -> None:
        """End here: no event follows, and the cache is free; where another thread is at work on the next event, once
        that is done."""
        self._closed = True
        if self._events is not None:
            self._end()

    def _end(self) -> None:
        """Unless a thread is at work on the next event: it sees afterwards that the stream is closed."""
        if self._working.acquire(blocking=False):
            try:
                self._events.close()
            finally:
                self._working.release()

    @property
    def holds_cache(self) -> bool:
        """Whether it has begun and not ended."""
        return self._events is not None and self._events.gi_frame is not None
