"""Messages between GPUs by copies, as threads that are late at random: nothing is written before it was read."""

import ctypes
import random
import threading
import time
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from dsa_layers.parallel import peer_copies
from dsa_layers.parallel.peer_copies import PeerCopies
from dsa_layers.parallel.symmetric_memory import SharedMemory

CPU = torch.device("cpu")
SECONDS = 60


class AtOnce:
    """In the place of a stream of copies: they are made as they are asked for."""

    def __init__(self, device):
        pass

    def copy(self, x, address):
        ctypes.memmove(address, x.data_ptr(), x.nbytes)

    def set_flag(self, address, value):
        flag = ctypes.c_int32.from_address(address)
        assert not flag.value, "the flag of an earlier message is still up"
        flag.value = value

    def nothing(self):
        pass

    begin = end = join = nothing


class Ranks:
    """Threads that are ranks, and the memory that they share in the order in which each asks for it."""

    def __init__(self, size):
        self.size, self.own = size, threading.local()
        self.meeting, self.shared = threading.Barrier(size, timeout=SECONDS), [None] * size

    def allocate(self, shape, dtype, device):
        """Memory is there as long as one of the ranks has it, and not more of it than lanes need."""
        lanes = [lane for lane in self.own.copies._lanes if lane._memory is not None] if self.own.copies else []
        if sum(memory() is not None for memory in self.own.memories) > len(lanes):
            self.own.found.append((self.own.rank, "memory that no lane has any more"))
        memory = torch.zeros(shape, dtype=dtype)
        self.own.memories.append(weakref.ref(memory))
        return memory

    def share(self, group, memory):
        flags = torch.zeros(peer_copies.HALVES * self.size, dtype=torch.int32)
        self.shared[self.own.rank] = memory, flags
        self.meeting.wait()
        of, flags_of = zip(*self.shared)
        self.meeting.wait()
        self.shared[self.own.rank] = None
        return SharedMemory(memory, of, Handle(self.own.rank, flags_of))


class Handle:
    """torch's handle of the memory."""

    def __init__(self, rank, flags_of):
        self.rank, self.flags = rank, flags_of
        self.signal_pad_ptrs = [flags.data_ptr() for flags in flags_of]

    def wait_signal(self, rank, number):
        flags, place = self.flags[self.rank], number * len(self.flags) + rank
        until = time.monotonic() + SECONDS
        while not flags[place]:
            assert time.monotonic() < until, "nothing came"
            time.sleep(1e-5)
        flags[place] = 0


def bytes_of(message, source, target, count):
    return (torch.arange(count) + 7 * message + 31 * source + 101 * target).to(torch.uint8)


def talk(ranks, rank, messages, found):
    """Messages of the same sizes on all ranks, up to three at once, which each ends in the order of their numbers."""
    ranks.own.rank, ranks.own.copies, ranks.own.memories, ranks.own.found = rank, None, [], found
    sizes, late = random.Random(0), random.Random(rank + 1)
    copies, begun = PeerCopies(None, peer_copies.lane_memory(1, ranks.size, CPU)), []
    ranks.own.copies = copies

    def end():
        message, places, ending = begun.pop(0)
        got = ending()
        for source in range(ranks.size):
            time.sleep(late.choice((0, 0, 0, 1e-3)))  # what is slow to read must not be overwritten
            expected = bytes_of(message, source, rank, places[rank])
            if not torch.equal(got[source * places[rank] :][: places[rank]], expected):
                found.append((rank, message, source))

    for message in range(messages):
        places = [sizes.choice((0, 8, 24, 40 + message)) for _ in range(ranks.size)]
        sent = [bytes_of(message, rank, target, places[target]) for target in range(ranks.size)]
        parts = [[x[:3], x[3:]] for x in sent]  # two tensors, one behind the other
        begun.append((message, places, copies.begin(parts, places)))
        time.sleep(late.choice((0, 0, 1e-3)))
        while len(begun) > sizes.choice((0, 1, 2)):
            end()
    while begun:
        end()
    found.append(len(copies._lanes))


@pytest.mark.parametrize("size", [2, 3])
def test_messages_in_lanes(size, monkeypatch):
    ranks, found = Ranks(size), []
    monkeypatch.setattr(peer_copies, "CopyStream", AtOnce)
    monkeypatch.setattr(peer_copies.backends, "on_device", lambda tensor: nullcontext())
    monkeypatch.setattr(peer_copies, "UNIT", 16)  # so that lanes grow
    monkeypatch.setattr(peer_copies, "share", ranks.share)
    monkeypatch.setattr(peer_copies, "meet", lambda group, device: ranks.meeting.wait())
    monkeypatch.setattr(peer_copies, "allocate", ranks.allocate)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda group: ranks.own.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group: size)
    threads = [threading.Thread(target=talk, args=(ranks, rank, 150, found), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert found == [3] * size  # as many lanes as there were messages on their way, and no wrong byte
