"""Bytes from each GPU of a machine to all others by their copy engines, beside what multiprocessors compute."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dsa.runtime import backends
from dsa_layers.parallel.symmetric_memory import allocate, made_by_all, meet, share

HALVES = 2  # of a lane's memory, which messages take in turn
UNIT = 2 << 20  # bytes that a half has a multiple of: memory is shared in pages


class CopyStream:
    """A second stream of a GPU for copies and flags: `begin`, copies, `end`; and `join` where the current stream needs
    them.

    It makes the driver's own calls. torch's take the host several times as long, and a prompt's pass has thousands of
    launches that would wait.
    """

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver  # comes with the kernels' DSL, which is for Linux

        self._driver, self._device = driver, device
        self._torch_stream = torch.cuda.Stream(device)
        self._stream = driver.CUstream(self._torch_stream.cuda_stream)
        flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value
        with torch.cuda.device(device):
            self._begun, self._ended = (self._call("cuEventCreate", flags) for _ in range(2))

    def begin(self) -> None:
        """What follows waits for what the current stream has to do."""
        self._call("cuEventRecord", self._begun, self._current())
        self._call("cuStreamWaitEvent", self._stream, self._begun, 0)

    def copy(self, x: torch.Tensor, address: int) -> None:
        """The bytes of x, which is contiguous and is to stay until `join`, to an address of any GPU."""
        if x.nbytes:
            self._call("cuMemcpyAsync", address, x.data_ptr(), x.nbytes, self._stream)

    def set_flag(self, address: int, value: int) -> None:
        """The int32 at an address of any GPU gets this value when the copies have arrived: by the stream itself, for
        which no multiprocessor has to be free."""
        self._call("cuStreamWriteValue32", self._stream, address, value, 0)

    def end(self) -> None:
        self._call("cuEventRecord", self._ended, self._stream)

    def join(self) -> None:
        """The current stream waits for what there was to do up to the end."""
        self._call("cuStreamWaitEvent", self._current(), self._ended, 0)

    def _current(self) -> int:
        # 1: the default stream of all threads, which 0 need not be.
        return torch.cuda.current_stream(self._device).cuda_stream or 1

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *results = getattr(self._driver, name)(*arguments)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: the CUDA driver answers {error.name}")
        return results[0] if results else None


class PeerCopies:
    """Messages between the ranks of a group: each sends bytes to each, into torch's symmetric memory.

    They go by copies from GPU to GPU, and a flag behind, for which no multiprocessor is needed: products that have all
    of them lose none, as they do to NCCL's kernels. Several messages may be on their way, each in a lane of its own.
    All ranks begin and end them in one order, and a rank where it computes: in one stream, without a CUDA graph. A rank
    waits for the others' messages without an end. What is begun and never ended keeps its lane.
    """

    def __init__(self, group: dist.ProcessGroup, memory: torch.Tensor) -> None:
        self._group, self._device, self._ranks = group, memory.device, dist.get_world_size(group)
        self._lanes = [_Lane(group, memory)]
        self._lanes[0].try_out()

    def begin(self, sent: Sequence[Sequence[torch.Tensor]], places: Sequence[int]) -> Callable[[], torch.Tensor]:
        """sent: of every rank what it gets from this one, contiguous tensors, whose bytes lie one behind the other
        there; places: of every rank the most bytes that it gets from one, the same on all ranks. The function that this
        gives makes the current stream wait for what the others have sent, and gives uint8 [ranks * places[rank]] of
        this rank: the places of all, one behind the other, for what is launched before this rank begins anything
        else."""
        lane, most = next((lane for lane in self._lanes if not lane.busy), None), max(places)
        if lane is None:
            lane = _Lane(self._group, lane_memory(most, self._ranks, self._device))
            self._lanes.append(lane)
        elif not lane.takes(most):
            lane.drop_memory()
            lane.place(lane_memory(most, self._ranks, self._device))
        return lane.begin(sent, places)


class _Lane:
    """A message begins when the one before has ended, whose data say that all ranks had ended the one before that: so
    halves of the memory in turn are free when they are written."""

    def __init__(self, group: dist.ProcessGroup, memory: torch.Tensor) -> None:
        self._group, self._rank, self._ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self._others = [(self._rank + step) % self._ranks for step in range(1, self._ranks)]  # no two ranks to one
        self.busy, self._half = False, 0
        self.place(memory)
        # What a rank gives itself is copied meanwhile.
        self._to_others, self._to_itself = CopyStream(memory.device), CopyStream(memory.device)

    def drop_memory(self) -> None:
        """Frees the memory of a lane in which this rank has ended all messages; all ranks free theirs."""
        device = self._memory.own.device
        torch.cuda.synchronize(device)  # nothing is on its way to others' memory when what maps it here goes
        self._memory = None
        torch.cuda.empty_cache()  # what comes in its place is not of PyTorch's cache
        meet(self._group, device)  # a GPU has its memory back when the last rank that mapped it is here

    def place(self, memory: torch.Tensor) -> None:
        """Messages go to this memory from now on; all ranks share theirs."""
        torch.cuda.synchronize(memory.device)  # PyTorch may fill it with zeros, which must not come behind a message
        self._memory = share(self._group, memory)
        rows, bytes_of_half = range(self._ranks), memory.shape[1]
        self._begins = [
            [self._memory.of[rank].data_ptr() + half * bytes_of_half for rank in rows] for half in range(HALVES)
        ]
        self._flags = [[self._memory.flag(rank, half) for rank in rows] for half in range(HALVES)]

    def try_out(self) -> None:
        """What messages are made of, without one: an error of it is then known before the ranks choose this way."""
        with backends.on_device(self._memory.own):
            self._to_others.begin()
            for rank in self._others:
                self._send(self._to_others, [self._memory.own[0, :8]], rank, 8)
                self._to_others.set_flag(self._flags[0][rank], 0)
            self._to_others.end()
            self._to_others.join()
        torch.cuda.synchronize(self._memory.own.device)

    def takes(self, most: int) -> bool:
        """Whether the memory has a place of so many bytes for each rank."""
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
            held.clear()  # whose memory others may get from here on
            self.busy = False
            return self._memory.own[half, : self._ranks * places[self._rank]]

        return end

    def _send(self, stream: CopyStream, tensors: Sequence[torch.Tensor], rank: int, place: int) -> None:
        address = self._begins[self._half][rank] + self._rank * place
        for x in tensors:
            stream.copy(x, address)
            address += x.nbytes


def lane_memory(most: int, ranks: int, device: torch.device) -> torch.Tensor:
    """Memory for messages of up to so many bytes from each rank."""
    return allocate((HALVES, -(-ranks * most // UNIT) * UNIT), torch.uint8, device)


@functools.cache
def peer_copies(group: dist.ProcessGroup, device: torch.device) -> PeerCopies | None:
    """Those of a group of ranks, all of which ask for them at the same time; None where there are none: without NCCL,
    on several machines, and of GPUs that cannot write to each other's memory."""
    memory = functools.partial(lane_memory, 1, dist.get_world_size(group), device)
    return made_by_all(group, device, "rows go", memory, lambda memory: PeerCopies(group, memory))
