"""Kernels that a CUDA graph runs on a second stream."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


class Branch:
    """What `side_stream` has set apart. join(): from here on others may read what it made."""

    def join(self) -> None:
        """Nothing, where all is launched in one order."""


class _Forked(Branch):
    def __init__(self, stream: torch.cuda.Stream, reads: tuple[torch.Tensor | None, ...]) -> None:
        self._stream, self._reads = stream, reads

    def join(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._reads = ()


@contextmanager
def side_stream(*reads: torch.Tensor | None) -> Iterator[Branch]:
    """The launches inside depend on those before, and those behind do not depend on them until `join` of the branch
    that this gives. They are on a stream of their own where a CUDA graph is captured: a replayed graph runs both chains
    at once, while launches of Python would only have more to do. Elsewhere they are launched in their order.

    reads: the tensors inside that may be dropped before `join`; the first one's device counts. Their memory is not
    given to others before. Branches beside a stream come one after the other: to join the last one is to join all.

    What is inside and what follows it up to `join` must not write what the other one reads or writes, nor read what the
    other one makes: a view of the batch that both read has to be made before (`cached_property`). Where nothing is
    allocated between this and the next branch beside the same stream, PyTorch's allocator needs to be told no more:
    memory that is dropped behind `join` is first given away in the next branch, which depends on all that was launched
    before it on that stream. With an allocator that frees by the stream (cudaMallocAsync) there is one order.
    """
    x = reads[0]
    if not x.is_cuda or not _captures():
        yield Branch()
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
    """The second stream of a stream, for all of its branches."""
    return torch.cuda.Stream(stream.device)
