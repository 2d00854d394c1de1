"""Chains of kernels that a captured step runs beside each other: neither touches what the other one makes."""

from contextlib import contextmanager

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsa_layers.checkpoint.loading import load_model
from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.layers import attention, branch, compressed_attention, moe
from dsa_layers.layers.branch import Branch, beside

FAMILIES = "deepseek_v32", "glm_moe_dsa", "deepseek_v4"
PROMPTS = [list(range(40, 310)), list(range(7, 160))]


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

    for module in (attention, compressed_attention, moe):
        monkeypatch.setattr(module, "beside", watch)
    with accesses:
        yield found


@pytest.fixture(scope="module")
def model(request, tiny_checkpoint):
    return load_model(tiny_checkpoint(request.param), drafter=True, progress=False)


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_chains_are_independent(model, drafts, watched):
    """In decoding passes, of one token and of several, where more keys are visible than selected."""
    generator = Generator(model, cache_tokens=1024, draft_tokens=drafts)
    passes, decode = [], generator._passes._decode

    def counted(sequences):
        before = len(watched)
        result = decode(sequences)
        passes.append(watched[before:])
        return result

    generator._passes._decode = counted
    generator.generate(PROMPTS, SamplingParams(max_new_tokens=5, temperature=0.0))
    layers = model.config.num_hidden_layers
    for branches in passes:
        assert all(b.joined for b in branches)
        # Attention of every layer and experts have something to do in both chains, but for layers without an indexer.
        assert sum(bool(b.inside.write and b.behind.write) for b in branches) > layers
    assert len(passes) > 1


def test_a_chain_that_reads_the_others_is_found(watched):
    """The judge above, on a branch that makes what is read before it is joined."""
    with attention.beside(torch.zeros(1)) as found:
        made = torch.ones(2) + 1
    made + 1
    with pytest.raises(AssertionError):
        found.join()


def test_memory_that_is_given_away_too_early_is_found(watched):
    x = torch.ones(1000)
    with attention.beside(torch.zeros(1)) as found:
        x + 1
    del x
    with pytest.raises(AssertionError):
        found.join()


def test_a_branch_depends_on_what_was_before_it_alone(watched):
    """The chain goes on in a later branch, which may read what was made since; the first one's part may not."""
    with attention.beside(torch.zeros(1)):
        first = torch.ones(2) + 1
    made = torch.ones(3) + 1
    with attention.beside(torch.zeros(1)) as last:
        first + made[0]
    last.join()
    assert all(one.joined for one in watched)
    with attention.beside(torch.zeros(1)):
        second = torch.ones(2) + 1
    with attention.beside(torch.zeros(1)) as last:
        torch.ones(1) + 1
    second + 1
    with pytest.raises(AssertionError):
        last.join()


def test_without_a_graph_there_is_one_order():
    with beside(torch.zeros(1)) as made:
        assert type(made) is Branch
    made.join()


class Streams:
    """Stands for torch.cuda while a stream captures."""

    def __init__(self, monkeypatch, backend="native"):
        self.current, self.made, self.done = "main", [], []
        for name, stub in {
            "is_current_stream_capturing": lambda: True,
            "get_allocator_backend": lambda: backend,
            "current_stream": lambda device: self.stream(self.current),
            "Stream": lambda device: self.made.append(device) or self.stream(f"side {len(self.made)}"),
            "stream": self.on,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stub)
        branch._beside.cache_clear()

    def stream(self, name):
        wait = lambda other: self.done.append(f"{name} waits for {other.name}")  # noqa: E731
        return Named(name, wait)

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before


class Named:
    device = "a GPU"

    def __init__(self, name, wait_stream):
        self.name, self.wait_stream = name, wait_stream

    def __hash__(self):
        return hash(self.name)

    def __eq__(self, other):
        return self.name == other.name


class OnGPU:
    is_cuda, device = True, "a GPU"


@torch.no_grad()
def test_forks_and_joins(monkeypatch):
    """One side stream for each stream that branches are beside."""
    streams = Streams(monkeypatch)
    for main in ("main", "main", "other"):
        streams.current = main
        with beside(OnGPU(), None) as made:
            assert streams.current.startswith("side")
        assert streams.current == main
        made.join()
    first = ["side 1 waits for main", "main waits for side 1"]
    assert streams.done == [*first, *first, "side 2 waits for other", "other waits for side 2"]


def test_gradients_and_other_allocators_have_one_order(monkeypatch):
    Streams(monkeypatch)
    with beside(OnGPU()) as made:
        assert type(made) is Branch
    Streams(monkeypatch, "cudaMallocAsync")
    with torch.no_grad(), beside(OnGPU()) as made:
        assert type(made) is Branch
