"""Messages between GPUs by copies, in threads that are late at random: no message overwrites an unread one."""

import ctypes
import random
import threading
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from dsa.parallel import peer_copies
from dsa.parallel.peer_copies import PeerCopies
from dsa.parallel.symmetric_memory import SharedMemory

CPU = torch.device("cpu")
SECONDS = 60
MESSAGES = 150


class AtOnce:
    """Stands in for `CopyStream`: makes each copy when it is asked for."""

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
    """Threads that are ranks, and the memory that they share."""

    def __init__(self, size):
        self.size, self.own = size, threading.local()
        self.barrier, self.shared = threading.Barrier(size, timeout=SECONDS), [None] * size

    def share(self, group, memory):
        flags = torch.zeros(peer_copies.HALVES * self.size, dtype=torch.int32)
        self.shared[self.own.rank] = memory, flags
        self.barrier.wait()
        memories, flags = zip(*self.shared)
        self.barrier.wait()
        return SharedMemory(memory, memories, Handle(self.own.rank, flags))


class Handle:
    """Stands in for torch's handle of the memory."""

    def __init__(self, rank, flags):
        self.rank, self.flags = rank, flags
        self.signal_pad_ptrs = [of_rank.data_ptr() for of_rank in flags]

    def wait_signal(self, rank, number):
        flags, place = self.flags[self.rank], number * len(self.flags) + rank
        until = time.monotonic() + SECONDS
        while not flags[place]:
            assert time.monotonic() < until, "nothing came"
            time.sleep(1e-5)
        flags[place] = 0


def bytes_of(message, source, target, count):
    return (torch.arange(count) + 7 * message + 31 * source + 101 * target).to(torch.uint8)


def talk(ranks, rank, found):
    """Send messages of the same sizes as all ranks, up to three at once. Appends wrong ones, then the lanes' number."""
    ranks.own.rank = rank
    sizes, late = random.Random(0), random.Random(rank + 1)
    copies, begun = PeerCopies(None, peer_copies.lane_memory(1, ranks.size, CPU)), []

    def end():
        message, places, ending = begun.pop(0)
        got = ending()
        for source in range(ranks.size):
            time.sleep(late.choice((0, 0, 0, 1e-3)))
            expected = bytes_of(message, source, rank, places[rank])
            if not torch.equal(got[source * places[rank] :][: places[rank]], expected):
                found.append((rank, message, source))

    for message in range(MESSAGES):
        places = [sizes.choice((0, 8, 24, 40 + message)) for _ in range(ranks.size)]
        sent = [bytes_of(message, rank, target, places[target]) for target in range(ranks.size)]
        begun.append((message, places, copies.begin([[x[:3], x[3:]] for x in sent], places)))
        time.sleep(late.choice((0, 0, 1e-3)))
        while len(begun) > sizes.choice((0, 1, 2)):
            end()
    while begun:
        end()
    found.append(len(copies._lanes))


@pytest.mark.parametrize("size", [2, 3])
def test_late_ranks_get_every_byte_of_every_message(size, monkeypatch):
    ranks, found = Ranks(size), []
    monkeypatch.setattr(peer_copies, "CopyStream", AtOnce)
    monkeypatch.setattr(peer_copies.backends, "on_device", lambda tensor: nullcontext())
    monkeypatch.setattr(peer_copies, "UNIT", 16)  # so that lanes grow
    monkeypatch.setattr(peer_copies, "share", ranks.share)
    monkeypatch.setattr(peer_copies, "meet", lambda group, device: ranks.barrier.wait())
    monkeypatch.setattr(peer_copies, "allocate", lambda shape, dtype, device: torch.zeros(shape, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(dist, "get_rank", lambda group: ranks.own.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group: size)
    threads = [threading.Thread(target=talk, args=(ranks, rank, found), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert found == [3] * size  # a lane for each message that is on its way, and no wrong byte
