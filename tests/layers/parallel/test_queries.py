"""In long passes, ranks split attention by queries: rows have the bits of one process, and only keys are sent."""

import contextlib
import itertools
from unittest import mock

import pytest
import torch

from dsa_layers import load_model
from dsa_layers.batch.sequence_batch import Chunk, prefill_batch
from dsa_layers.layers.rope import RopeAngles
from dsa_layers.models.deepseek_v4 import DeepseekV4ForCausalLM
from dsa_layers.parallel.placement import Sharded, placement_of
from dsa_layers.parallel.ranks import ALONE
from tests.layers.parallel.processes import in_ranks
from tests.layers.parallel.ways import OPTIONS

# (new, earlier) tokens of two sequences in each pass. LONG: the passes with at least 256 new tokens (SHARDED_TOKENS).
# In these, each rank has half of the rows; in the first pass, all ranks have all rows.
PASSES = [(130, 0), (20, 0)], [(150, 130), (110, 20)], [(1, 280), (257, 130)]
LONG = 1, 2
# {model: number of layers that run}. In glm_moe_dsa, only the third of these layers has no indexer.
LAYERS = {"deepseek_v32": 2, "deepseek_v4": 3, "glm_moe_dsa": 4}


def attention(model, x, batch, cache):
    """Yield attention's result in each of the first LAYERS layers. All layers read the same x, this rank's rows."""
    count = LAYERS[model.config.model_type]
    if isinstance(model, DeepseekV4ForCausalLM):
        for i, layer in enumerate(model.layers[:count]):
            ratio = model.config.compress_rates.get(model.config.layer_types[i])
            rotary = model.rotaries["main" if ratio is None else "compress"]
            entry_rope = None if ratio is None else rotary(batch.entries(ratio).positions)
            yield layer.attn(x, RopeAngles(rotary(batch.positions)), entry_rope, batch, cache.layer(i))
        return
    selected = None
    for i, layer in enumerate(model.model.layers[:count]):
        y, selected = layer.self_attn(x, *model.model.rotary(batch.positions), batch, cache.layer(i), selected)
        yield y


@torch.inference_mode()
def attended(model, ranks):
    """Return ({(pass, layer): attention's result for this rank's rows}, the indices of these rows in each pass)."""
    torch.manual_seed(0)
    size, dtype = model.page_size, model.precision.dtype
    cache = model.make_cache(20, size)
    pages, slots = [cache.allocator.allocate(10) for _ in range(2)], cache.state_slots.allocate(2)
    found, numbers = {}, []
    for i, lens in enumerate(PASSES):
        chunks = [Chunk(*of_one, own, slot) for of_one, own, slot in zip(lens, pages, slots)]
        batch = prefill_batch(chunks, size, "cpu")
        rows = placement_of(batch, ranks)
        x = torch.randn(len(batch.positions), model.config.hidden_size).to(dtype)
        numbers.append(rows.local(torch.arange(len(x))))
        found |= {(i, j): y for j, y in enumerate(attention(model, rows.local(x), batch, cache))}
    return found, numbers


@contextlib.contextmanager
def exchanges(found):
    """Context manager: append the bytes per row of each gather to `found`. `Sharded.reduce` raises TypeError."""
    begin = Sharded._start_all_gather

    def begin_gather(rows, own, *, at_once):
        found.append(sum(x[:1].nbytes for x in own))
        return begin(rows, own, at_once=at_once)

    with mock.patch.object(Sharded, "_start_all_gather", begin_gather), mock.patch.object(Sharded, "reduce", None):
        yield


def of_ranks(ranks, directories):
    """Return {(model, key of OPTIONS): (the result of `attended`, the bytes per row of each gather)}."""
    found = {}
    for (model, directory), name in itertools.product(directories.items(), OPTIONS):
        part, exchanged = load_model(directory, mesh=ranks, **OPTIONS[name]), []
        with exchanges(exchanged):
            found[model, name] = attended(part, ranks), exchanged
    return found


@pytest.fixture(scope="module")
def checkpoints(tiny_checkpoint):
    return {model: tiny_checkpoint(model) for model in LAYERS}


@pytest.fixture(scope="module")
def of_both(checkpoints):
    return in_ranks(2, of_ranks, checkpoints)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("model", LAYERS)
def test_rows_are_those_of_one_process(checkpoints, of_both, model, name):
    """Long passes have the bits of one process. In short passes, sums of the ranks' parts round differently."""
    expected, _ = attended(load_model(checkpoints[model], **OPTIONS[name]), ALONE)
    tolerance = {"fp32": 1e-6, "fp8": 0.01}[name]
    for (found, numbers), _ in (of_one[model, name] for of_one in of_both):
        assert found.keys() == expected.keys()
        for (i, j), y in found.items():
            rows = expected[i, j][numbers[i]]
            assert len(rows) == sum(new for new, _ in PASSES[i]) // (2 if i in LONG else 1)
            if i in LONG:
                assert torch.equal(y, rows), (i, j)
            else:
                assert (y - rows).abs().max() < tolerance * rows.abs().max(), (i, j)


@pytest.mark.slow
def test_ranks_exchange_only_keys(of_both):
    """Attention gathers once per layer: latents and index keys in bf16, and products of V4's compressors in fp32."""
    latent, index = (512 + 64) * 2, 128 * 2
    per_layer = {
        "deepseek_v32": [latent + index] * 2,
        "glm_moe_dsa": [latent + index if full else latent for full in (True, True, False, True)],
        "deepseek_v4": [1024, 1024 + 2 * 4 * (1024 + 256), 1024 + 2 * 4 * 512],
    }
    for of_one, (model, sizes) in itertools.product(of_both, per_layer.items()):
        _, exchanged = of_one[model, "fp8"]
        assert exchanged == sizes * len(LONG)
