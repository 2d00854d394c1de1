"""Kernels that a CUDA graph runs on a second stream, at the same time as those of the first."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


class SideStream:
    """What `side_stream` yields. join(): later launches may read what was computed inside."""

    def join(self) -> None:
        """Do nothing: all launches are in one order."""


class _Forked(SideStream):
    def __init__(self, stream: torch.cuda.Stream, reads: tuple[torch.Tensor | None, ...]) -> None:
        self._stream, self._reads = stream, reads

    def join(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._reads = ()


@contextmanager
def side_stream(*reads: torch.Tensor | None) -> Iterator[SideStream]:
    """While a CUDA graph is captured, launch what is inside on a second stream. Otherwise launch it in order.

    What is inside waits for all earlier launches. Later launches do not wait for it before `join` of the result, so a
    replayed graph runs both at the same time. To join the last of several joins all. Outside of a graph a second stream
    would only add work on the host.

    reads: tensors that are read inside and that the caller may drop before `join`. Their memory is not reused before.
    The first one decides the device.

    Between the beginning and `join`, neither side may write what the other reads or writes, or read what the other
    computes. Compute a view of the batch that both read before (`cached_property`). Memory that is allocated inside
    belongs to the second stream: if it is dropped after `join`, only a later `side_stream` reuses it, and that one
    waits for all earlier launches. With an allocator that frees by stream (cudaMallocAsync), launches stay in order.
    """
    x = reads[0]
    if not x.is_cuda or not _captures():
        yield SideStream()
        return
    stream = torch.cuda.current_stream(x.device)
    side = _second_stream(stream)
    side.wait_stream(stream)
    with torch.cuda.stream(side):
        yield _Forked(side, reads)


def _captures() -> bool:
    return torch.cuda.is_current_stream_capturing() and torch.cuda.get_allocator_backend() == "native"


@cache
def _second_stream(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """Return the second stream that is paired with `stream`: the same one at every call."""
    return torch.cuda.Stream(stream.device)
