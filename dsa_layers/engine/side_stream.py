"""Concurrent kernels in a CUDA graph, on a second stream."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch


@dataclass
class SideStream:
    """The value that `side_stream` yields.

    stream  the second stream; None if all launches are on one stream
    reads   the tensors that this object keeps alive until `join`
    """

    stream: torch.cuda.Stream | None = None
    reads: tuple[torch.Tensor | None, ...] = ()

    def join(self) -> None:
        """Make later launches wait for the kernels of the `with` block, so that they can read the results."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
            self.reads = ()


@contextmanager
def side_stream(*reads: torch.Tensor | None) -> Iterator[SideStream]:
    """Launch the kernels of a `with` block on a second stream during CUDA graph capture, else on the current stream.

    The kernels in the block wait for all earlier launches. Later launches do not wait for these kernels until the
    caller calls `join` on the yielded value. So a replayed graph can run the block's kernels and the later ones at the
    same time. If several blocks are not joined yet, `join` of the last one waits for all.

    reads: the tensors that the block reads and that the caller may drop before `join`. The yielded value references
    them until `join`, so that their memory is not reused. The first tensor determines the device.

    Until `join`, neither stream may write a tensor that the other stream reads or writes. If both streams read a
    `cached_property` of the batch, compute the property before the block. Memory that the block allocates belongs to
    the second stream. If the caller frees this memory after `join`, only a later `side_stream` block can reuse it, and
    that block waits for all earlier launches. This holds for PyTorch's native allocator only; with another allocator,
    all launches stay on the current stream.
    """
    x = reads[0]
    captures = x.is_cuda and torch.cuda.is_current_stream_capturing()
    if not captures or torch.cuda.get_allocator_backend() != "native":
        yield SideStream()
        return
    stream = torch.cuda.current_stream(x.device)
    side = _second_stream(stream)
    side.wait_stream(stream)
    with torch.cuda.stream(side):
        yield SideStream(side, reads)


@cache
def _second_stream(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    return torch.cuda.Stream(stream.device)
