"""Bytes from each GPU of a machine to all others by their copy engines, beside what multiprocessors compute."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dsa_layers.parallel.symmetric_memory import SharedMemory, allocate, made_by_all, share

HALVES = 2  # of a lane's memory, which messages take in turn
UNIT = 2 << 20  # bytes that a half has a multiple of, as torch allocates no less


class PeerCopies:
    """Messages between the ranks of a group: each sends bytes to each, which torch's symmetric memory gets.

    What a message carries goes by copies, GPU to GPU, in a stream of its own, and its flag behind it, for which no
    multiprocessor is needed: products that have all of them lose none, as they do to NCCL's kernels. Several messages
    may be on their way, each in a lane of its own; all ranks begin and end them in one order. In a lane a message
    begins when the one before has ended, whose data say that all ranks had ended the one before that: so halves of the
    memory in turn are free when they are written. They grow with the longest message.
    """

    def __init__(self, group: dist.ProcessGroup, memory: torch.Tensor) -> None:
        self._group, self._device = group, memory.device
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._lanes = [_Lane(share(group, memory))]
        # Its own part a rank copies meanwhile.
        self._to_others, self._to_itself = _Beside(self._device), _Beside(self._device)

    def begin(self, sent: Sequence[Sequence[torch.Tensor]], places: Sequence[int]) -> Callable[[], torch.Tensor]:
        """sent: of every rank what it gets from this one, contiguous tensors, whose bytes lie one behind the other
        there; places: of every rank the most bytes that it gets from one. The function that this gives makes the
        current stream wait for what the others have sent, and gives uint8 [ranks, places[rank]] of this rank: bytes
        from each, for what is launched before this rank begins anything else."""
        lane = self._lane(max(places))
        lane.busy, lane.half = True, 1 - lane.half
        memory, half, sent = lane.memory, lane.half, [*sent]
        others = [(self._rank + step) % self._ranks for step in range(1, self._ranks)]  # no two ranks to one at a time
        with self._to_others.begin():
            for rank in others:
                _copy(sent[rank], memory.of[rank][half, self._rank * places[rank] :])
                memory.raise_flag(rank, half)
        with self._to_itself.begin():
            _copy(sent[self._rank], memory.own[half, self._rank * places[self._rank] :])

        def end() -> torch.Tensor:
            for rank in others:
                memory.await_flag(rank, half)
            self._to_others.end()
            self._to_itself.end()
            sent.clear()  # whose memory others may get from here on
            lane.busy = False
            return memory.own[half, : self._ranks * places[self._rank]].view(self._ranks, places[self._rank])

        return end

    def _lane(self, most: int) -> "_Lane":
        """The first one in which nothing is on its way, with a place of so many bytes for each rank."""
        lane = next((lane for lane in self._lanes if not lane.busy), None)
        if lane is None:
            self._lanes.append(lane := _Lane(share(self._group, lane_memory(most, self._ranks, self._device))))
        elif lane.memory.own.shape[1] < most * self._ranks:
            torch.cuda.synchronize(self._device)  # nothing is on its way to others' old memory when it goes
            lane.memory = share(self._group, lane_memory(most, self._ranks, self._device))
        return lane


@dataclass
class _Lane:
    memory: SharedMemory
    half: int = 0
    busy: bool = False


class _Beside:
    """A stream beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def begin(self) -> AbstractContextManager:
        """What is launched inside waits for what the current stream has to do."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def end(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def lane_memory(most: int, ranks: int, device: torch.device) -> torch.Tensor:
    """Memory for messages of up to so many bytes from each rank."""
    return allocate((HALVES, -(-ranks * most // UNIT) * UNIT), torch.uint8, device)


def _copy(tensors: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
    begin = 0
    for x in tensors:
        memory[begin : begin + x.nbytes].copy_(x.detach().view(-1).view(torch.uint8))
        begin += x.nbytes


@functools.cache
def peer_copies(group: dist.ProcessGroup, device: torch.device) -> PeerCopies | None:
    """Those of a group of ranks, all of which ask for them at the same time; None where there are none: without NCCL,
    on several machines, and of GPUs that cannot write to each other's memory."""
    memory = functools.partial(lane_memory, 1, dist.get_world_size(group), device)
    return made_by_all(group, device, "rows go", memory, lambda memory: PeerCopies(group, memory))
