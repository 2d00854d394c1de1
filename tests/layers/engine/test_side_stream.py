"""Test on a CPU that, before the join, neither the main nor the side stream accesses memory that the other writes."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsa_layers import Generator, SamplingParams, load_model
from dsa_layers.engine import fused_moe, paged_attention, paged_compressed_attention
from dsa_layers.engine.side_stream import SideStream
from tests.layers.layers.calls import record

PROMPTS = [list(range(40, 180)), list(range(7, 60))]


def memory(values):
    return {StorageWeakRef(x.untyped_storage()) for x in tree_leaves(values) if torch.is_tensor(x)}


class Accesses(TorchDispatchMode):
    """If `into` is not None, add the memory that PyTorch's operators read and write to `into.read` and `into.write`."""

    into = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if self.into is not None:
            schema = func._schema.arguments
            given = dict(zip((a.name for a in schema), args)) | (kwargs or {})
            written = [given.get(a.name) for a in schema if a.alias_info is not None and a.alias_info.is_write]
            read = memory((args, kwargs))
            self.into.write |= memory(written) | (memory(made) - read)
            self.into.read |= read
        return made


class Watched(SideStream):
    """A side stream that records accesses to memory and checks them when it is joined.

    accesses  the dispatch mode that records the accesses
    open      the side streams that are not joined yet, including this one
    reads     the tensors that this object keeps alive
    inside    the memory that this side stream accesses
    after     the memory that the main stream accesses between this side stream's block and the next block or the join
    """

    joined = False

    def __init__(self, accesses, open_, reads):
        self.accesses, self.open, self.reads = accesses, open_, reads
        self.inside, self.after = (SimpleNamespace(read=set(), write=set()) for _ in range(2))

    def join(self):
        assert self is self.open[-1]  # a join of the last side stream also joins the earlier ones
        self.accesses.into = None
        made = set().union(*(one.inside.write for one in self.open))
        for number, one in enumerate(self.open):
            inside = one.inside
            for after in (later.after for later in self.open[number:]):
                assert not inside.write & (after.read | after.write) and not after.write & inside.read
            # Memory that the side stream reads must not be freed before the join, unless a side stream wrote it.
            assert not [x for x in inside.read if x.expired() and x not in made]
        for one in self.open:
            one.joined, one.reads = True, ()
        self.open.clear()


@pytest.fixture
def watched(monkeypatch):
    """Record the accesses of both streams. Yield the growing list of side streams, one per `side_stream` block."""
    found, open_, accesses = [], [], Accesses()

    @contextmanager
    def watch(*reads):
        for earlier in open_:
            earlier.reads = ()  # callers keep only the last `SideStream`, so earlier ones hold no tensors
        open_.append(made := Watched(accesses, open_, reads))
        found.append(made)
        accesses.into = made.inside
        yield made
        accesses.into = made.after

    for module in (paged_attention, paged_compressed_attention, fused_moe):
        monkeypatch.setattr(module, "side_stream", watch)
    with accesses:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize(("family", "drafts"), [("deepseek_v32", 0), ("deepseek_v4", 2), ("glm_moe_dsa", 2)])
def test_streams_are_independent_until_the_join(family, drafts, tiny_checkpoint, watched, monkeypatch):
    model = load_model(tiny_checkpoint(family), drafter=drafts > 0, progress=False)
    generator = Generator(model, cache_tokens=1024, draft_tokens=drafts)
    starts = record(monkeypatch, "_decode", seen=lambda *_: len(watched), owner=generator.passes)
    generator.generate(PROMPTS, SamplingParams(max_tokens=3, temperature=0.0))
    assert starts and all(side.joined for side in watched)
    for start, end in zip(starts, [*starts[1:], len(watched)]):
        # MoE layers, and attention with an indexer, run kernels on both streams: more blocks than layers.
        both = [side for side in watched[start:end] if side.inside.write and side.after.write]
        assert len(both) > model.config.num_hidden_layers
