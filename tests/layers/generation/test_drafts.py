"""Generation with drafts: the tokens are those without, whatever is drafted, and drafts are those of the drafter."""

import functools

import pytest
import torch

from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.cache.kv_cache import OutOfPages
from dsa_layers.checkpoint.loading import load_model
from dsa_layers.families.registry import model_types
from dsa_layers.generation.captured_step import CapturedStep
from dsa_layers.generation.draws import RandomStream
from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams, sample, sample_drafted
from tests.layers.generation.guesses import Guesses, guess

# Longer than what is selected, and a few tokens; prompts that end in other passes than they begin in.
PROMPTS = [[2 + i * i % 2000 for i in range(170)], [7, 8, 9], list(range(5, 80)), [3]]
LIMITS = [18, 13, 6, 15]


@pytest.fixture(scope="module", params=model_types())
def model(request, tiny_checkpoint):
    directory = tiny_checkpoint(request.param, quantized=False)
    return load_model(directory, dtype=torch.float32, drafter=True, progress=False)


@pytest.fixture(scope="module")
def without_drafts(model):
    """Call it with a temperature: (tokens, throughput), which tests with other numbers of drafts are compared with."""
    return functools.cache(lambda temperature=0.0, prompts=None: generate(model, temperature, PROMPTS[:prompts]))


def generate(model, temperature=0.0, prompts=PROMPTS, **options):
    generator = Generator(model, cache_tokens=2048, prefill_chunk=60, **options)
    free = generator.cache.allocator.free, generator.cache.state_slots.free
    params = [SamplingParams(n, temperature=temperature, seed=i) for i, n in enumerate(LIMITS[: len(prompts)])]
    completions = generator.generate(prompts, params)
    assert (generator.cache.allocator.free, generator.cache.state_slots.free) == free
    return [c.tokens for c in completions], generator.throughput


@pytest.mark.parametrize("drafts", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_those_without_drafts(model, without_drafts, drafts, temperature, monkeypatch):
    """Greedy and sampled, of sequences that take other numbers of drafts, and end at other times."""
    expected, without = without_drafts(temperature)
    guess(monkeypatch, Guesses(expected, drafts))
    got, throughput = generate(model, temperature, draft_tokens=drafts)
    assert got == expected
    assert throughput.decode_tokens == without.decode_tokens and without.drafted == 0
    assert throughput.drafted / 4 < throughput.taken < throughput.drafted  # some of each are right


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("drafts", [1, 3])
def test_drafts_are_the_drafters(model, without_drafts, drafts, captured, monkeypatch):
    """Beside a pass over the whole sequence and the target's states, and one more for each further draft, which has
    the states that the one before gave; behind drafts that were taken, and such that were not."""
    expected, _ = without_drafts(prompts=2)
    seen = guess(monkeypatch, Guesses(expected, drafts))
    if captured:
        capture_passes(monkeypatch)
    got, throughput = generate(model, draft_tokens=drafts, prompts=PROMPTS[:2])
    assert got == expected and 0 < throughput.taken < throughput.drafted
    assert len(seen) > 10
    for tokens, found in seen[::5]:
        assert found == drafted(model, tokens, drafts)


@torch.inference_mode()
def drafted(model, tokens, drafts):
    tokens, found = torch.tensor(tokens), []
    cache = model.drafter.make_cache(2, 256, state_slots=1)

    def batch(new, total):
        return SequenceBatch.paged([new], [total], [[1, 0]], 256, state_slots=[0])

    known = len(tokens) - 1
    states = model.states(tokens[:-1], SequenceBatch.without_cache([known]))
    last = model.drafter(tokens[1:], states, batch(known, known), cache)[-1:]
    for i in range(drafts):
        found.append(int(model.drafter.logits(last).argmax()))
        last = model.drafter(torch.tensor(found[-1:]), last, batch(1, known + i + 1), cache)
    return found


def capture_passes(monkeypatch):
    """Sizes rounded up, tensors that stay: a pass that stands in for a graph runs again on them."""

    class Replay:
        def __init__(self, run):
            self.run, self.results = run, run()

        def replay(self):
            new = self.run()
            for old, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (self.results, new))):
                old.copy_(other)

    def capture(self, inputs):
        replay = Replay(lambda: self._run(inputs))
        return replay, replay.results

    make = CapturedStep.__init__

    def init(self, *arguments, **options):
        make(self, *arguments, **options)
        self._captures = True

    monkeypatch.setattr(CapturedStep, "__init__", init)
    monkeypatch.setattr(CapturedStep, "_capture", capture)


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_the_same_where_passes_are_captured(model, without_drafts, drafts, monkeypatch):
    """Of sequences that take other numbers of drafts in a pass."""
    expected, _ = without_drafts()
    guess(monkeypatch, Guesses(expected, drafts))
    capture_passes(monkeypatch)
    got, throughput = generate(model, draft_tokens=drafts)
    assert got == expected
    assert throughput.drafted / 4 < throughput.taken < throughput.drafted


def test_the_distribution_is_the_models():
    """Tokens of a vocabulary of four, behind drafts that are always the same: chi-square below its 99.9% quantile."""
    logits = torch.tensor([[0.3, 1.0, -0.5, 0.1], [1.2, -0.2, 0.4, 0.0]])
    params, count = SamplingParams(temperature=1, seed=3), 4000
    stream = RandomStream(params.seed)
    first, second = torch.zeros(4), torch.zeros(4)
    for _ in range(count):
        ((a, *rest),) = sample_drafted(logits[None], [[1]], [params], [stream])
        first[a] += 1
        assert bool(rest) == (a == 1)
        for b in rest:
            second[b] += 1
    for counts, row in ((first, logits[0]), (second, logits[1])):
        expected = torch.softmax(row, 0) * counts.sum()
        assert ((counts - expected).square() / expected).sum() < 16.27  # three degrees of freedom


def test_rows_that_are_not_finite():
    logits = torch.tensor([[[0.0, 5.0], [torch.nan, 0.0]], [[torch.inf, 0.0], [1.0, 0.0]], [[0.0, 1.0], [2.0, 1.0]]])
    params = [SamplingParams()] * 3
    assert sample_drafted(logits, [[1], [0], [0]], params, [None] * 3) == [[1, None], [None], [1]]
    assert sample(logits[:, 0], params, [None] * 3) == [1, None, 1]


def test_wrong_numbers_of_drafts(model):
    with pytest.raises(ValueError, match=r"^draft_tokens: must be"):
        Generator(model, draft_tokens=4)
    drafter, model.drafter = model.drafter, None
    try:
        with pytest.raises(ValueError, match=r"^draft_tokens: must be 0 for a model without a drafter .*, got 1"):
            Generator(model, draft_tokens=1)
    finally:
        model.drafter = drafter


def test_a_drafters_cache_that_the_device_has_not_room_for(model, monkeypatch):
    """The message has what both caches take. The model's is one without memory here."""
    make, make_drafters = type(model).make_cache, type(model.drafter).make_cache

    def full(self, *size, state_slots):
        if size[-1] != "meta":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return make_drafters(self, *size, state_slots=state_slots)

    size = 2**16, model.page_size, "meta"
    nbytes = sum(one.make_cache(*size, state_slots=65).nbytes for one in (model, model.drafter))
    monkeypatch.setattr(type(model), "make_cache", lambda self, *size, **slots: make(self, *size[:2], "meta", **slots))
    monkeypatch.setattr(type(model.drafter), "make_cache", full)
    tokens = (2**16 - 1) * model.page_size
    message = f"cache_tokens: a cache of {tokens} tokens takes {nbytes / 1e9:.1f} GB, which cannot be allocated on cpu"
    with pytest.raises(ValueError, match=message):
        Generator(model, cache_tokens=tokens, draft_tokens=1)


@pytest.mark.parametrize(("drafts", "named"), [(1, "1 draft"), (2, "2 drafts")])
def test_a_prompt_whose_drafts_have_no_room(model, drafts, named):
    size = model.page_size
    generator = Generator(model, cache_tokens=size, draft_tokens=drafts)
    message = rf"prompts\[0\]: 3 prompt tokens and {size - 3} new ones and {named} need 2 pages"
    with pytest.raises(OutOfPages, match=message):
        generator.generate([[1, 2, 3]], SamplingParams(size - 3))
