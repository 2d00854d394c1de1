"""The events of one request of an engine, as its reader asks for them."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Self

from dsa_layers.generation.results import TokenEvent


class RequestStream(Iterator[TokenEvent]):
    """The events of a request, by `Engine.stream` or `Engine.add_stream`. The passes that it runs serve all requests.

    request  its number
    events   those that are computed and not yet read
    error    of the pass that ended the request, to be raised after these
    """

    def __init__(
        self, request: int, next_event: Callable[[Self], TokenEvent | None], abort: Callable[[int], None]
    ) -> None:
        self.request, self._next_event, self._abort = request, next_event, abort
        self.events: deque[TokenEvent] = deque()
        self.error: Exception | None = None

    def __next__(self) -> TokenEvent:
        event = self._next_event(self)
        if event is None:
            raise StopIteration
        return event

    def close(self) -> None:
        """End the request, also while another thread reads the stream. So does dropping the last reference to it."""
        self._abort(self.request)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the interpreter's end
            self.close()
