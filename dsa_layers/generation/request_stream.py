"""The events of one request of an engine, as its reader asks for them."""

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dsa_layers.generation.results import TokenEvent

if TYPE_CHECKING:
    from dsa_layers.generation.engine import Engine


class RequestStream(Iterator[TokenEvent]):
    """The events of a request, by `Engine.stream` or `Engine.add_stream`. The passes that it runs serve all requests.

    request  its number
    events   those that are computed and not yet read
    error    of the pass that ended the request, to be raised after these
    """

    def __init__(self, engine: "Engine", request: int) -> None:
        self._engine, self.request = engine, request
        self.events: deque[TokenEvent] = deque()
        self.error: Exception | None = None

    def __next__(self) -> TokenEvent:
        event = self._engine.next_event(self)
        if event is None:
            raise StopIteration
        return event

    def close(self) -> None:
        """End the request, also while another thread reads the stream. So does dropping the last reference to it."""
        self._engine.abort(self.request)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the interpreter's end
            self.close()
