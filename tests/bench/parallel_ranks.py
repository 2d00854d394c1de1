"""Ranks of the benchmark of several GPUs on a CPU, with a clock of the host and the smallest stacks."""

import dataclasses
import gc
import time

import torch

from dsa_bench.e2e import one_of_many, parallel_cases, parallel_rows, stacks
from dsa_bench.e2e.clock import Clock
from dsa_layers.parallel import rows as shared_rows
from dsa_layers.parallel.ranks import ALONE
from tests.bench.small_stacks import FEWER, SMALL

# A prompt of whole rows, of shared ones, and one that is computed once, in two passes. Ranks share rows from fewer
# tokens on than elsewhere: a pass over four times as many takes a CPU three times as long.
SHARED_ROWS = 64
FEW_EXPERTS = {"n_routed_experts": 4}  # two on each rank
PROMPTS, SEQUENCES, CONTEXT = {40: 2, 66: 1, 90: 0}, (1, 3), 200
RUNS = [*(f"prefill {n}" for n in PROMPTS), *(f"decode {n} x {CONTEXT}" for n in SEQUENCES)]


class HostClock(Clock):
    """Stands for the GPUs' clocks and memory."""

    def __init__(self, ranks):
        super().__init__(ranks, torch.device("cpu"))
        self._scratch = torch.zeros(1)

    def mark(self):
        return time.perf_counter()

    def ms(self, begin, end):
        return 1000 * (end - begin)

    def forget_peak(self):
        pass

    def peak(self):
        return max(self.everyones(10**9 + self._ranks.rank))

    def free(self):
        return min(self.everyones(10**15))


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
    """In this process all stacks and cases are small, and nothing is profiled."""
    gc.freeze()  # or each collection between runs would go through all that was imported
    for name, (file, fields) in stacks.STACKS.items():
        stacks.STACKS[name] = (file, fields | SMALL | FEWER[name] | FEW_EXPERTS | stacks.with_layers(name, 3))
    parallel_cases.PROMPTS, parallel_cases.SEQUENCES, parallel_cases.CONTEXT = PROMPTS, SEQUENCES, CONTEXT
    parallel_cases.CHUNK, parallel_cases.STEP_REPEATS = 70, 1
    shared_rows.SHARED_ROWS = SHARED_ROWS
    parallel_rows.events_of = events_of
    parallel_rows.layers_that_fit = layers_that_fit


def rows(ranks, options):
    """(rows, what was told) of a rank."""
    make_small()
    told = []
    return [*parallel_rows.rank_rows(ranks, HostClock(ranks), tell=told.append, **options)], told


def rows_of_a_part(ranks, options):
    """The rows of one of two, which this process is alone."""
    make_small()
    return [*one_of_many.rows(2, clock=HostClock(ALONE), **options)]


def rows_of_other_weights(ranks, options):
    """The same where the ranks' generators give other numbers."""
    make_small()
    draw = stacks._draw

    def drawn(name, values, *rest):
        draw(name, values, *rest)
        if name.endswith("gate.weight"):
            values.mul_(1 + ranks.rank)

    stacks._draw = drawn
    return _error(ranks, options)


def rows_of_other_logits(ranks, options):
    """The same where one of them computes other logits."""
    make_small()
    prefill = parallel_cases.prefill

    def make(model, **given):
        run = prefill(model, **given)
        return dataclasses.replace(run, timed=lambda: run.timed() + ranks.rank)

    parallel_cases.prefill = make
    return _error(ranks, options)


def _error(ranks, options):
    try:
        list(parallel_rows.rank_rows(ranks, HostClock(ranks), **options))
    except RuntimeError as error:
        return str(error)
    return None


def clock_of_stubs(ranks, _):
    """What the clock says of two calls, where the GPUs' events are a host's counter that goes faster on later ranks;
    and the order of what it did."""
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
    meet = clock.meet
    clock.meet = lambda: (done.append("meet"), meet())
    clock.forget_peak()
    return clock.times(lambda: done.append("call"), 2), clock.peak(), clock.free(), done
