"""Tests of DecodeBatch: its tensors, and passes over drafts, whose logits must agree with those of one-token passes."""

import pytest
import torch

from dsa.testing import calc_diff
from dsa_layers import DecodeBatch, SequenceBatch, load_model
from dsa_layers.cache.compressed_kv_cache import CompressedKVCache
from dsa_layers.cache.drafts import DRAFTS

PAGE, SLOW = 64, pytest.mark.slow
# Two sequences are longer than the 128 keys that V3.2 and GLM select. Pages are not in order.
LENGTHS, PAGES = [200, 40, 131], [[5, 2, 8, 1], [7], [3, 9, 4]]
SAME = ("positions", "sequences", "visible_keys", "slots", "cu_query_lens", "last_tokens", "earlier_lens_tensor")


def batches(next_n):
    """Return a DecodeBatch (lengths on the device) and a SequenceBatch (lengths on the host) of the same new tokens."""
    table = torch.tensor([[*own, *[-1] * (4 - len(own))] for own in PAGES], dtype=torch.int32)
    slots = torch.arange(3, dtype=torch.int32)
    device = DecodeBatch(table, PAGE, torch.tensor(LENGTHS, dtype=torch.int32), 256, slots, next_n)
    return device, SequenceBatch.paged([next_n] * 3, LENGTHS, PAGES, PAGE, state_slots=[0, 1, 2])


@pytest.mark.parametrize("next_n", [1, 2, 4])
def test_a_decode_batch_equals_a_sequence_batch_of_the_same_lengths(next_n):
    device, host = batches(next_n)
    assert device.query_lens == host.query_lens == (next_n,) * 3
    assert device.is_decode and device.next_n == next_n
    for name in SAME:
        assert torch.equal(getattr(device, name), getattr(host, name)), name
    assert device.most_selected(128).tolist() == LENGTHS  # not limited to 128: the attention op limits the lengths
    assert torch.equal(device.selected_counts(128), host.visible_keys.clamp(max=128))


COUNT = 8  # decoded tokens at the end of each sequence
TOKENS = [torch.randint(2, 2000, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]


MODELS = [("glm_moe_dsa", "fp8"), ("deepseek_v4", "model")]
MODELS += [pytest.param(case, marks=SLOW) for case in (("deepseek_v32", "model"), ("deepseek_v4", "fp8"))]


@pytest.fixture(scope="module", params=MODELS, ids=str)
def model(request, tiny_checkpoint):
    """An fp32 model with cached latents in FP8 (kv_cache "fp8") or in fp32 (kv_cache "model")."""
    name, kv_cache = request.param
    return load_model(tiny_checkpoint(name, quantized=False), dtype=torch.float32, progress=False, kv_cache=kv_cache)


@pytest.fixture(scope="module")
def one_by_one(model):
    """Logits [3, COUNT, vocabulary] of the last COUNT tokens, from passes over one token per sequence."""
    cache, found = filled(model), []
    for done in range(COUNT):
        found.append(step(model, cache, [done] * 3, last_tokens(done, 1)))
    return torch.cat(found, 1)


def last_tokens(done, count):
    """Return [3, count]: `count` tokens from index `done` on, among the last COUNT tokens of each sequence."""
    return torch.stack([own[len(own) - COUNT + done :][:count] for own in TOKENS])


def page_of(model):
    return min(model.page_size, 128)


@torch.inference_mode()
def filled(model):
    """Return a cache with the tokens of each sequence before its last COUNT tokens."""
    cache, lens = model.make_cache(10, page_of(model), state_slots=4), [n - COUNT for n in LENGTHS]
    batch = SequenceBatch.paged(lens, lens, PAGES, page_of(model), state_slots=[0, 1, 2])
    model(torch.cat([own[:-COUNT] for own in TOKENS]), batch, cache)
    return cache


@torch.inference_mode()
def step(model, cache, done, new):
    """Return the logits [3, n, vocabulary] of `new` [3, n], after done[i] of sequence i's last COUNT tokens."""
    table, slots = batches(1)[0].block_table, torch.arange(3, dtype=torch.int32)
    next_n = new.shape[1]
    lens = torch.tensor([n - COUNT + before + next_n for n, before in zip(LENGTHS, done)], dtype=torch.int32)
    batch = DecodeBatch(table, page_of(model), lens, 256, slots, next_n)
    return model(new.flatten(), batch, cache, all_tokens=True).unflatten(0, (3, next_n))


def assert_same(model, got, expected):
    if model.precision.kv_cache == "fp8":  # values that differ in the last fp32 bit may round to two e4m3 numbers
        assert calc_diff(got, expected) < 1e-5
    else:
        assert (got - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_rejected_drafts_leave_nothing_in_the_cache(model, one_by_one):
    """Each pass writes a random number of wrong drafts per sequence to pages and, in V4, to rings and states."""
    cache, done, drafts = filled(model), [0] * 3, 3
    generator = torch.Generator().manual_seed(drafts)
    while min(done) < COUNT:
        done = [min(before, COUNT - 1) for before in done]  # a finished sequence repeats its last token
        new, after = torch.randint(2, 2000, (3, 1 + drafts), generator=generator), []
        for i, before in enumerate(done):
            right = min(1 + int(torch.randint(1 + drafts, (), generator=generator)), COUNT - before)
            new[i, :right] = last_tokens(before, right)[i]
            after.append(before + right)
        got = step(model, cache, done, new)
        for i, (before, now) in enumerate(zip(done, after)):
            assert_same(model, got[i, : now - before], one_by_one[i, before:now])
        done = after


def test_more_drafts_than_rings_have_room_for_are_refused(model):
    """DRAFTS + 1 drafts would overwrite keys in V4's rings that the pass still reads. Pages have no such limit."""
    next_n = DRAFTS + 2
    cache, new = filled(model), last_tokens(COUNT - next_n, next_n)
    if isinstance(cache, CompressedKVCache):
        with pytest.raises(ValueError, match=f"batch: next_n must be at most {DRAFTS + 1} .*, got {next_n}"):
            step(model, cache, [COUNT - next_n] * 3, new)
    else:
        step(model, cache, [COUNT - next_n] * 3, new)


@torch.no_grad()
def test_a_pass_without_a_token_gives_no_logits(model):
    cache, none = model.make_cache(2), torch.zeros(0, dtype=torch.int64)
    decoding = DecodeBatch(torch.zeros(0, 2, dtype=torch.int32), cache.page_size, none.int(), 1, none.int())
    paged = SequenceBatch.paged([], [], [], cache.page_size, state_slots=[])
    for batch, own in ((SequenceBatch.without_cache([]), None), (paged, cache), (decoding, cache)):
        assert model(none, batch, own).shape == (0, model.config.vocab_size)
