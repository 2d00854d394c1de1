"""Functions that the ranks of `dsa_bench.e2e.parallel` run in tests on a CPU, with the host's clock and small
stacks."""

import dataclasses
import gc
import time

import torch

from dsa_bench.e2e import parallel, stacks
from dsa_bench.e2e.clock import Clock
from dsa_layers.parallel import placement
from dsa_layers.parallel.ranks import ALONE
from tests.bench import small_stacks

# PROMPTS is {tokens: repeats}. Zero repeats are one run without a warm-up.
#
# Passes of at least SHARDED_TOKENS tokens divide their rows among the ranks. So the prompt of 66 tokens is divided, and
# the prompt of 40 is not. The prompt of 90 tokens runs in passes of 70 (CHUNK) and 20.
#
# In production, SHARDED_TOKENS is 256. With 64, the prompts can be short, so that the tests take less time.
SHARDED_TOKENS = 64
PROMPTS, SEQUENCES, CONTEXT = {40: 2, 66: 1, 90: 0}, (1, 3), 200
RUNS = [*(f"prefill {n}" for n in PROMPTS), *(f"decode {n} x {CONTEXT}" for n in SEQUENCES)]


class HostClock(Clock):
    """Measures times with the host's clock. Its numbers of bytes are fixed."""

    def __init__(self, ranks):
        super().__init__(ranks, torch.device("cpu"))
        self._scratch = torch.zeros(1)

    def mark(self):
        return time.perf_counter()

    def ms(self, begin, end):
        return 1000 * (end - begin)

    def forget_peak(self):
        pass

    def held(self):
        return 0

    def peak(self):
        return max(self.gather(10**9 + self._ranks.rank))

    def free(self):
        return min(self.gather(10**15))


def events_of(call, *, host):
    assert not host
    call()
    names = ("ncclDevKernel_AllReduce", "work", "ncclDevKernel_SendRecv")
    return [{"cat": "kernel", "name": name, "ts": 10 * i, "dur": 3.0 - i} for i, name in enumerate(names)]


def layers_that_fit(name, gpus, memory, tokens):
    of_all = {"V3.2": 200, "V4-Flash": 90}.get(name, tokens)
    assert memory == 10**15 and (tokens == of_all if gpus == 2 else tokens <= of_all)
    return {1: 4, 2: 3}[gpus]


def make_small():
    """Make all stacks and cases of this process small. Replace `events_of` and `layers_that_fit`."""
    gc.freeze()  # keeps collections between runs from visiting the objects of imported modules
    # With four experts, each of the two ranks has two.
    small_stacks.make_small(stacks.STACKS, n_routed_experts=4)
    for name, (file, fields) in stacks.STACKS.items():
        stacks.STACKS[name] = (file, fields | stacks.with_layers(name, 3))
    parallel.PROMPTS, parallel.SEQUENCES, parallel.CONTEXT = PROMPTS, SEQUENCES, CONTEXT
    parallel.CHUNK, parallel.STEP_REPEATS = 70, 1
    placement.SHARDED_TOKENS = SHARDED_TOKENS
    parallel.events_of, parallel.layers_that_fit = events_of, layers_that_fit


def rows(ranks, options):
    """Return (the rows that this rank yields, the messages that it passes to `tell`)."""
    make_small()
    told = []
    return [*parallel.rank_rows(ranks, HostClock(ranks), tell=told.append, **options)], told


def rows_of_a_part(ranks, options):
    make_small()
    return [*parallel.part_rows(2, clock=HostClock(ALONE), **options)]


def error_of_other_weights(ranks, options):
    """Multiply the router's weights, which every rank has whole, by rank + 1. Return the error's message."""
    make_small()
    fill = stacks.fill

    def filled(name, values, *rest):
        fill(name, values, *rest)
        if name.endswith("gate.weight"):
            values.mul_(1 + ranks.rank)

    stacks.fill = filled
    return _error(ranks, options)


def error_of_other_logits(ranks, options):
    make_small()
    prefill = parallel.prefill

    def make(model, **options):
        run = prefill(model, **options)
        return dataclasses.replace(run, timed=lambda: run.timed() + ranks.rank)

    parallel.prefill = make
    return _error(ranks, options)


def _error(ranks, options):
    try:
        list(parallel.rank_rows(ranks, HostClock(ranks), **options))
    except RuntimeError as error:
        return str(error)
    return None


def clock_of_stubs(ranks, _):
    """Time two calls with stubs of torch.cuda's events and memory functions.

    An event records its position in the list `done`. The time between two events is the difference of their positions,
    multiplied by rank + 1.

    Return (times [ranks, 2], peak bytes, free bytes, done).
    """
    done = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            done.append("record")
            self.at = len(done)

        def synchronize(self):
            done.append("synchronize")

        def elapsed_time(self, later):
            return (later.at - self.at) * (1.0 + ranks.rank)

    for name, stub in {
        "Event": Event,
        "max_memory_allocated": lambda device: (300 << 20) + ranks.rank,
        "mem_get_info": lambda device: (1000 - ranks.rank, 2000),
        "reset_peak_memory_stats": lambda device: done.append("reset"),
    }.items():
        setattr(torch.cuda, name, stub)
    clock = Clock(ranks, torch.device("cpu"))
    align = clock.align
    clock.align = lambda: (done.append("align"), align())
    clock.forget_peak()
    return clock.times(lambda: done.append("call"), 2), clock.peak(), clock.free(), done
