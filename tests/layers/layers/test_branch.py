"""Chains of kernels that a captured step runs beside each other: neither touches what the other one makes."""

from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsa_layers.engine import paged_attention
from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.io.loading import load_model
from dsa_layers.layers import branch, compressed_attention, moe
from dsa_layers.layers.branch import Branch, side_stream

PROMPTS = [list(range(40, 180)), list(range(7, 60))]


def memory(tensors):
    return {StorageWeakRef(x.untyped_storage()) for x in tensors}


class Accesses(TorchDispatchMode):
    """What PyTorch's operators read and write while `into` is set."""

    into = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if self.into is not None:
            given = dict(zip((a.name for a in func._schema.arguments), args)) | (kwargs or {})
            names = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
            written = [x for name in names for x in tree_leaves(given.get(name)) if torch.is_tensor(x)]
            read = [x for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)]
            self.into.write |= memory([*written, *(x for x in tree_leaves(made) if torch.is_tensor(x))]) - memory(read)
            self.into.write |= memory(written)
            self.into.read |= memory(read)
        return made


class Chain:
    def __init__(self):
        self.read, self.write = set(), set()


class Watched(Branch):
    """open: the branches that no join has ended yet, of which this is one."""

    joined = False

    def __init__(self, accesses, open_, reads):
        self.accesses, self.open, self.reads = accesses, open_, reads
        self.inside, self.behind = Chain(), Chain()

    def join(self):
        assert self is self.open[-1]  # which joins the ones before
        self.accesses.into = None
        made = set().union(*(one.inside.write for one in self.open))
        for number, one in enumerate(self.open):
            inside = one.inside
            for behind in (later.behind for later in self.open[number:]):
                assert not inside.write & (behind.read | behind.write) and not behind.write & inside.read
            # What is read inside is not given away before: the branch has it, or others will.
            assert not [x for x in inside.read if x.expired() and x not in made]
        for one in self.open:
            one.joined, one.reads = True, ()
        self.open.clear()


@pytest.fixture
def watched(monkeypatch):
    """The branches of all passes, in their order."""
    found, open_, accesses = [], [], Accesses()

    @contextmanager
    def watch(*reads):
        for earlier in open_:
            assert accesses.into is earlier.behind or earlier is not open_[-1]  # none within another
            earlier.reads = ()  # nobody keeps a branch that is joined by a later one
        open_.append(made := Watched(accesses, open_, reads))
        found.append(made)
        accesses.into = made.inside
        yield made
        accesses.into = made.behind

    for module in (paged_attention, compressed_attention, moe):
        monkeypatch.setattr(module, "side_stream", watch)
    with accesses:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "drafts"),
    [
        ("deepseek_v32", 0),
        ("deepseek_v4", 2),
        ("deepseek_v32", 2),
        ("glm_moe_dsa", 2),
    ],
)
def test_chains_are_independent(family, drafts, tiny_checkpoint, watched):
    """In decoding passes, of one token and of several, where more keys are visible than selected."""
    model = load_model(tiny_checkpoint(family), drafter=drafts > 0, progress=False)
    generator = Generator(model, cache_tokens=1024, draft_tokens=drafts)
    passes, decode = [], generator.engine.passes._decode

    def counted(sequences):
        before = len(watched)
        result = decode(sequences)
        passes.append(watched[before:])
        return result

    generator.engine.passes._decode = counted
    generator.generate(PROMPTS, SamplingParams(max_tokens=3, temperature=0.0))
    layers = model.config.num_hidden_layers
    for branches in passes:
        assert all(b.joined for b in branches)
        # Attention of every layer and experts have something to do in both chains, but for layers without an indexer.
        assert sum(bool(b.inside.write and b.behind.write) for b in branches) > layers
    assert passes


def test_a_chain_that_reads_what_the_other_one_makes_is_found(watched):
    """By the judge above; a later branch may read it."""
    with paged_attention.side_stream(torch.zeros(1)):
        made = torch.ones(2) + 1
    with paged_attention.side_stream(torch.zeros(1)) as last:
        made + 1
    last.join()
    with paged_attention.side_stream(torch.zeros(1)) as branch:
        made = torch.ones(2) + 1
    made + 1
    with pytest.raises(AssertionError):
        branch.join()


@dataclass(frozen=True)
class Stream:
    """Stands for a stream of a GPU; compared by its name."""

    name: str
    waits: list = field(compare=False)
    device: str = "a GPU"

    def wait_stream(self, other):
        self.waits.append(f"{self.name} waits for {other.name}")


class Streams:
    """Stands for torch.cuda while a stream captures."""

    def __init__(self, monkeypatch, backend="native"):
        self.current, self.made, self.waits = "main", 0, []
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(self.current, self.waits))
        monkeypatch.setattr(torch.cuda, "Stream", self.make)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        branch._second_stream.cache_clear()

    def make(self, device):
        self.made += 1
        return Stream(f"side {self.made}", self.waits)

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before


ON_GPU = SimpleNamespace(is_cuda=True, device="a GPU")


@torch.no_grad()
def test_each_stream_has_one_side_stream_which_forks_and_joins(monkeypatch):
    streams = Streams(monkeypatch)
    for main in ("main", "main", "other"):
        streams.current = main
        with side_stream(ON_GPU, None) as made:
            assert streams.current.startswith("side")
        assert streams.current == main
        made.join()
    first = ["side 1 waits for main", "main waits for side 1"]
    assert streams.waits == [*first, *first, "side 2 waits for other", "other waits for side 2"]


@pytest.mark.parametrize(
    ("x", "gradients", "backend"),
    [(torch.zeros(1), False, "native"), (ON_GPU, True, "native"), (ON_GPU, False, "cudaMallocAsync")],
    ids=["CPU", "gradients", "another allocator"],
)
def test_there_is_one_order_elsewhere(x, gradients, backend, monkeypatch):
    Streams(monkeypatch, backend)
    with torch.set_grad_enabled(gradients), side_stream(x) as made:
        assert type(made) is Branch
    made.join()
