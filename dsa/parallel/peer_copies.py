"""Messages between the GPUs of a machine. Copy engines send them while the SMs compute."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dsa.parallel.symmetric_memory import allocate, made_by_all, meet, share
from dsa.runtime import backends

HALVES = 2  # a lane's memory has two halves, and consecutive messages alternate between them
UNIT = 2 << 20  # bytes: a half's size is a multiple of UNIT, because GPUs share memory in pages


class CopyStream:
    """A second stream of a GPU for copies and flags. Call `begin`, then `copy` and `set_flag`, then `end`. Call `join`
    before the current stream uses the results.

    This class calls the CUDA driver directly. The equivalent calls of torch take several times as much host time, and
    would delay the thousands of launches of a prefill pass.
    """

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver  # this package comes with the kernels' DSL, which is for Linux only

        self._driver, self._device = driver, device
        self._torch_stream = torch.cuda.Stream(device)
        self._stream = driver.CUstream(self._torch_stream.cuda_stream)
        flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value
        with torch.cuda.device(device):
            self._begun, self._ended = (self._call("cuEventCreate", flags) for _ in range(2))

    def begin(self) -> None:
        """Make later copies wait for the current stream."""
        self._call("cuEventRecord", self._begun, self._current())
        self._call("cuStreamWaitEvent", self._stream, self._begun, 0)

    def copy(self, x: torch.Tensor, address: int) -> None:
        """Copy contiguous x to an address in any GPU's memory. x must not be freed before `join`."""
        if x.nbytes:
            self._call("cuMemcpyAsync", address, x.data_ptr(), x.nbytes, self._stream)

    def set_flag(self, address: int, value: int) -> None:
        """Write an int32 to an address in any GPU's memory after the copies. This stream operation needs no SM."""
        self._call("cuStreamWriteValue32", self._stream, address, value, 0)

    def end(self) -> None:
        self._call("cuEventRecord", self._ended, self._stream)

    def join(self) -> None:
        """Make the current stream wait for all operations before `end`."""
        self._call("cuStreamWaitEvent", self._current(), self._ended, 0)

    def _current(self) -> int:
        # The driver's handle 1 is the legacy default stream; handle 0 may be the per-thread default stream.
        return torch.cuda.current_stream(self._device).cuda_stream or 1

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *results = getattr(self._driver, name)(*arguments)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: the CUDA driver answers {error.name}")
        return results[0] if results else None


class PeerCopies:
    """Messages between the ranks of a group: each rank sends bytes to every other rank, into torch's symmetric memory.

    A message consists of copies from GPU to GPU, each followed by a flag. It needs no SM, while NCCL's kernels take SMs
    from matrix products that run at the same time. Several messages may be under way, each in a separate lane. All
    ranks must begin and end messages in the same order, on the stream that computes, and outside of CUDA graphs. A rank
    waits for the other ranks' messages without a time limit. A lane is occupied until its message has ended.
    """

    def __init__(self, group: dist.ProcessGroup, memory: torch.Tensor) -> None:
        self._group, self._device, self._ranks = group, memory.device, dist.get_world_size(group)
        self._lanes = [_Lane(group, memory)]
        self._lanes[0].try_out()

    def begin(self, sent: Sequence[Sequence[torch.Tensor]], places: Sequence[int]) -> Callable[[], torch.Tensor]:
        """Begin a message.

        sent    a list per rank: the contiguous tensors to send to that rank. Their bytes arrive one after the other
        places  a number per rank: the most bytes that it receives from one rank. All ranks must pass the same numbers

        Return a function that ends the message: it makes the current stream wait for the other ranks' tensors, and
        returns the received bytes, uint8 [ranks * places[rank]]. They are valid until this rank begins another message.
        """
        lane, most = next((lane for lane in self._lanes if not lane.busy), None), max(places)
        if lane is None:
            lane = _Lane(self._group, lane_memory(most, self._ranks, self._device))
            self._lanes.append(lane)
        elif not lane.takes(most):
            lane.drop_memory()
            lane.place(lane_memory(most, self._ranks, self._device))
        return lane.begin(sent, places)


class _Lane:
    """Memory for one message at a time, in two halves. Message n begins after message n - 1 has ended on this rank. By
    then all ranks have ended message n - 2, so the half that messages n - 2 and n use is free."""

    def __init__(self, group: dist.ProcessGroup, memory: torch.Tensor) -> None:
        self._group, self._rank, self._ranks = group, dist.get_rank(group), dist.get_world_size(group)
        # The order in which this rank sends: at each step, every rank sends to a different rank.
        self._others = [(self._rank + step) % self._ranks for step in range(1, self._ranks)]
        self.busy, self._half = False, 0
        self.place(memory)
        # A separate stream runs a rank's copies to itself, so that they overlap with the other copies.
        self._to_others, self._to_itself = CopyStream(memory.device), CopyStream(memory.device)

    def drop_memory(self) -> None:
        """Free the memory after all messages have ended. All ranks must call this method together."""
        device = self._memory.own.device
        torch.cuda.synchronize(device)  # a copy must not be under way while the memory is unmapped
        self._memory = None
        torch.cuda.empty_cache()  # PyTorch's cache cannot supply the next memory, so release it
        meet(self._group, device)  # a GPU's memory is not free until all ranks have unmapped it

    def place(self, memory: torch.Tensor) -> None:
        """Use this memory for the next messages. All ranks must call this method together."""
        torch.cuda.synchronize(memory.device)  # PyTorch may still be filling the memory with zeros
        self._memory = share(self._group, memory)
        rows, bytes_of_half = range(self._ranks), memory.shape[1]
        self._begins = [
            [self._memory.of[rank].data_ptr() + half * bytes_of_half for rank in rows] for half in range(HALVES)
        ]
        self._flags = [[self._memory.flag(rank, half) for rank in rows] for half in range(HALVES)]

    def try_out(self) -> None:
        """Make all driver calls of a message once. An error is then raised before the ranks decide to use messages."""
        with backends.on_device(self._memory.own):
            self._to_others.begin()
            for rank in self._others:
                self._send(self._to_others, [self._memory.own[0, :8]], rank, 8)
                self._to_others.set_flag(self._flags[0][rank], 0)
            self._to_others.end()
            self._to_others.join()
        torch.cuda.synchronize(self._memory.own.device)

    def takes(self, most: int) -> bool:
        """Return whether the memory has room for `most` bytes from each rank."""
        return self._ranks * most <= self._memory.own.shape[1]

    def begin(self, sent: Sequence[Sequence[torch.Tensor]], places: Sequence[int]) -> Callable[[], torch.Tensor]:
        self.busy, self._half = True, 1 - self._half
        half, held, gives_itself = self._half, [*sent], bool(sent[self._rank])
        with backends.on_device(self._memory.own):
            self._to_others.begin()
            for rank in self._others:
                self._send(self._to_others, sent[rank], rank, places[rank])
                self._to_others.set_flag(self._flags[half][rank], 1)
            self._to_others.end()
            if gives_itself:
                self._to_itself.begin()
                self._send(self._to_itself, sent[self._rank], self._rank, places[self._rank])
                self._to_itself.end()

        def end() -> torch.Tensor:
            with backends.on_device(self._memory.own):
                for rank in self._others:
                    self._memory.await_flag(rank, half)
                self._to_others.join()
                if gives_itself:
                    self._to_itself.join()
            held.clear()  # the sent tensors may be freed now
            self.busy = False
            return self._memory.own[half, : self._ranks * places[self._rank]]

        return end

    def _send(self, stream: CopyStream, tensors: Sequence[torch.Tensor], rank: int, place: int) -> None:
        address = self._begins[self._half][rank] + self._rank * place
        for x in tensors:
            stream.copy(x, address)
            address += x.nbytes


def lane_memory(most: int, ranks: int, device: torch.device) -> torch.Tensor:
    """Allocate memory for messages of up to `most` bytes from each rank."""
    return allocate((HALVES, -(-ranks * most // UNIT) * UNIT), torch.uint8, device)


@functools.cache
def peer_copies(group: dist.ProcessGroup, device: torch.device) -> PeerCopies | None:
    """Return the `PeerCopies` of a group, which the first call creates. All ranks must make the first call together.
    Return None without NCCL, on several machines, or if GPUs cannot write to each other's memory."""
    memory = functools.partial(lane_memory, 1, dist.get_world_size(group), device)
    return made_by_all(group, device, "rows go", memory, lambda memory: PeerCopies(group, memory))
