"""Passes over the last few tokens of sequences, beside passes over one and over prompts' chunks."""

import pytest
import torch

from dsa.testing import calc_diff
from dsa_layers.batch.decode_batch import DecodeBatch
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.cache.compressed_kv_cache import CompressedKVCache
from dsa_layers.cache.drafts import DRAFTS
from dsa_layers.checkpoint.loading import load_model

PAGE = 64
# More tokens than are selected, and fewer; pages in any order.
LENGTHS, PAGES = [200, 40, 131], [[5, 2, 8, 1], [7], [3, 9, 4]]
SAME = ("positions", "sequences", "visible_keys", "slots", "cu_query_lens", "last_tokens", "earlier_lens_tensor")


def batches(next_n):
    """The same new tokens, as the device and as the host knows their lengths."""
    table = torch.tensor([[*own, *[-1] * (4 - len(own))] for own in PAGES], dtype=torch.int32)
    slots = torch.arange(3, dtype=torch.int32)
    device = DecodeBatch(table, PAGE, torch.tensor(LENGTHS, dtype=torch.int32), 256, slots, next_n)
    return device, SequenceBatch.paged([next_n] * 3, LENGTHS, PAGES, PAGE, state_slots=[0, 1, 2])


@pytest.mark.parametrize("next_n", [1, 2, 4])
def test_it_is_what_the_host_makes_of_the_same_lengths(next_n):
    device, host = batches(next_n)
    assert device.query_lens == host.query_lens == (next_n,) * 3
    assert device.is_decode and device.next_n == next_n
    for name in SAME:
        assert torch.equal(getattr(device, name), getattr(host, name)), name
    assert device.most_selected(128).tolist() == LENGTHS  # which attention compares with its columns
    assert torch.equal(device.selected_counts(128), host.visible_keys.clamp(max=128))


@pytest.fixture(
    scope="module",
    params=[("deepseek_v32", "fp8"), ("glm_moe_dsa", "fp8"), ("deepseek_v32", "model"), ("deepseek_v4", "model")],
    ids=str,
)
def model(request, tiny_checkpoint):
    """Latents in bytes, or in pages of floats; index keys are rounded to FP8 with the former. Weights are not."""
    name, kv_cache = request.param
    return load_model(tiny_checkpoint(name, quantized=False), dtype=torch.float32, progress=False, kv_cache=kv_cache)


def page_of(model):
    return min(model.page_size, 128)


def sequences(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 2000, (n,), generator=generator) for n in LENGTHS]


def filled(model, tokens, without):
    """A cache with all of the tokens but for so many of the last."""
    cache = model.make_cache(10, page_of(model), state_slots=4)
    lens = [n - without for n in LENGTHS]
    batch = SequenceBatch.paged(lens, lens, PAGES, page_of(model), state_slots=[0, 1, 2])
    model(torch.cat([own[:-without] for own in tokens]), batch, cache)
    return cache


def step(model, cache, new, lens):
    """Logits [3, n, vocabulary] of a pass over the tokens new [3, n], with which the sequences have these lengths."""
    table, slots = batches(1)[0].block_table, torch.arange(3, dtype=torch.int32)
    lens, next_n = torch.tensor(lens, dtype=torch.int32), new.shape[1]
    batch = DecodeBatch(table, page_of(model), lens, 256, slots, next_n)
    return model(new.flatten(), batch, cache, all_tokens=True).unflatten(0, (3, next_n))


def one_by_one(model, tokens, count):
    """Logits [3, count, vocabulary] after each of the last tokens."""
    cache, found = filled(model, tokens, count), []
    for i in range(-count, 0):
        new = torch.stack([own[i] for own in tokens])[:, None]
        found.append(step(model, cache, new, [n + i + 1 for n in LENGTHS]))
    return torch.cat(found, 1)


def assert_same(model, got, expected):
    if model.precision.kv_cache == "fp8":  # what differs in the last bit of fp32 may round to another number of e4m3
        assert calc_diff(got, expected) < 1e-5
    else:
        assert (got - expected).abs().max() <= 2e-5 * expected.abs().max()


@torch.inference_mode()
@pytest.mark.parametrize("next_n", [2, 3, 4])
def test_a_pass_over_a_few_tokens_is_as_many_over_one(model, next_n):
    tokens = sequences(next_n)
    cache, got = filled(model, tokens, 4), []
    for first in range(0, 4, next_n):
        count = min(next_n, 4 - first)
        new = torch.stack([own[len(own) - 4 + first :][:count] for own in tokens])
        got.append(step(model, cache, new, [n - 4 + first + count for n in LENGTHS]))
    assert_same(model, torch.cat(got, 1), one_by_one(model, tokens, 4))


@torch.inference_mode()
@pytest.mark.parametrize("drafts", [1, 3])
def test_tokens_that_are_taken_back_leave_nothing(model, drafts):
    """Each pass has a token that is right, and drafts, of which another number is right for each sequence. What the
    wrong ones have written is written over or not read: in pages, rings and states of blocks that they ended."""
    count = 12
    tokens, expected = sequences(drafts), None
    expected = one_by_one(model, tokens, count)
    cache, done = filled(model, tokens, count), [0] * 3
    generator = torch.Generator().manual_seed(drafts)
    while min(done) < count:
        new, right = torch.randint(2, 2000, (3, 1 + drafts), generator=generator), []
        for i, own in enumerate(tokens):
            at = min(done[i], count - 1)  # one that has ended waits for the others
            right.append(min(int(torch.randint(1 + drafts, (), generator=generator)), count - 1 - at))
            new[i, : 1 + right[i]] = own[len(own) - count + at :][: 1 + right[i]]
            done[i] = at
        lens = [n - count + at + 1 + drafts for n, at in zip(LENGTHS, done)]
        got = step(model, cache, new, lens)
        for i, at in enumerate(done):
            assert_same(model, got[i, : 1 + right[i]], expected[i, at : at + 1 + right[i]])
            done[i] = at + 1 + right[i]


def test_more_drafts_than_rings_have_room_for(model):
    """V4's tokens would overwrite keys that the first of them still see. Pages have no such bound."""
    tokens, next_n = sequences(5), DRAFTS + 2
    cache = filled(model, tokens, next_n)
    table = torch.tensor([[*own, *[-1] * (4 - len(own))] for own in PAGES], dtype=torch.int32)
    lens, slots = torch.tensor(LENGTHS, dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    batch = DecodeBatch(table, page_of(model), lens, 256, slots, next_n)
    new = torch.cat([own[-next_n:] for own in tokens])
    if isinstance(cache, CompressedKVCache):
        with pytest.raises(ValueError, match=f"batch: next_n must be at most {DRAFTS + 1} .*, got {next_n}"):
            model(new, batch, cache)
    else:
        model(new, batch, cache)


@torch.no_grad()
def test_passes_without_a_token(model):
    """As an engine's rank has them: nothing in, nothing out, with a cache and without one."""
    cache, none = model.make_cache(2), torch.zeros(0, dtype=torch.int64)
    decoding = DecodeBatch(torch.zeros(0, 2, dtype=torch.int32), cache.page_size, none.int(), 1, none.int())
    paged = SequenceBatch.paged([], [], [], cache.page_size, state_slots=[])
    for batch, own in ((SequenceBatch.without_cache([]), None), (paged, cache), (decoding, cache)):
        assert model(none, batch, own).shape == (0, model.config.vocab_size)
