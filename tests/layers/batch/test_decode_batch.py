"""Passes over the last few tokens of sequences, beside passes over one and over prompts' chunks."""

import pytest
import torch

from dsa_layers.batch.decode_batch import DecodeBatch
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.checkpoint.loading import load_model
from dsa_layers.tiny import write_tiny_checkpoint

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
    most = device.most_selected(128)
    assert most.tolist() == [min(n, 128) for n in LENGTHS]
    assert torch.equal(device.selected_counts(128), host.visible_keys.clamp(max=128))


@pytest.fixture(scope="module", params=[("deepseek_v32", True), ("glm_moe_dsa", True), ("deepseek_v32", False)])
def model(request, tmp_path_factory):
    """Index keys and latents in FP8 pages, or in pages of floats; weights are not rounded in either."""
    name, quantized = request.param
    directory = tmp_path_factory.mktemp(name)
    write_tiny_checkpoint(directory, model=name, quantized=False)
    model = load_model(directory, dtype=torch.float32, progress=False, kv_cache="fp8" if quantized else "model")
    return model


def filled(model, tokens):
    """A cache with all of the tokens but for the last four."""
    cache = model.make_cache(10, PAGE, state_slots=4)
    lens = [n - 4 for n in LENGTHS]
    batch = SequenceBatch.paged(lens, lens, PAGES, PAGE, state_slots=[0, 1, 2])
    model(torch.cat([own[:-4] for own in tokens]), batch, cache)
    return cache


@torch.inference_mode()
@pytest.mark.parametrize("next_n", [2, 3, 4])
def test_a_pass_over_a_few_tokens_is_as_many_over_one(model, next_n):
    generator = torch.Generator().manual_seed(next_n)
    tokens = [torch.randint(2, 2000, (n,), generator=generator) for n in LENGTHS]
    table = batches(1)[0].block_table
    expected, cache = [], filled(model, tokens)
    for i in range(4):
        lens = torch.tensor(LENGTHS, dtype=torch.int32) - 3 + i
        batch = DecodeBatch(table, PAGE, lens, 256, torch.arange(3, dtype=torch.int32))
        expected.append(model(torch.stack([own[i - 4] for own in tokens]), batch, cache))
    expected = torch.stack(expected, 1)

    cache, got = filled(model, tokens), []
    for first in range(0, 4, next_n):
        count = min(next_n, 4 - first)
        lens = torch.tensor(LENGTHS, dtype=torch.int32) - 4 + first + count
        batch = DecodeBatch(table, PAGE, lens, 256, torch.arange(3, dtype=torch.int32), count)
        new = torch.stack([own[len(own) - 4 + first :][:count] for own in tokens]).flatten()
        got.append(model(new, batch, cache, all_tokens=True).unflatten(0, (3, count)))
    got = torch.cat(got, 1)
    # What differs in the last bit of fp32 may round to another number of e4m3.
    tolerance = 1e-3 if model.precision.kv_cache == "fp8" else 2e-5
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()


def test_rings_take_one_token_at_a_time(tmp_path):
    write_tiny_checkpoint(tmp_path, model="deepseek_v4", quantized=False)
    model = load_model(tmp_path, dtype=torch.float32, progress=False)
    batch, _ = batches(2)
    with pytest.raises(ValueError, match=r"^batch: rings take one new token of a sequence a pass, got next_n=2"):
        model(torch.zeros(6, dtype=torch.int64), batch, model.make_cache(10, 256, state_slots=4), all_tokens=True)
