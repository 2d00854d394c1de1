"""GLM-5.2's tiny checkpoint, which has the published FP8 layout, against transformers' model with the same weights."""

import pytest
import torch

from dsa import dequantize_per_block
from dsa.testing import calc_diff
from dsa_layers import SequenceBatch, load_model
from dsa_layers.errors import CheckpointError
from tests.layers.io.stand_ins import changed, dropper
from tests.layers.models.parity import assert_same, paged_run

TOKENS = torch.randint(0, 2048, (150,), generator=torch.Generator().manual_seed(2))
WHOLE = SequenceBatch.without_cache([150])
PAGE = 64


def dequantise(tensors):
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        tensors[weight] = dequantize_per_block(tensors[weight], tensors.pop(name), torch.float32)
    dropper("model.layers.5.")(tensors)  # the multi-token-prediction layer


@pytest.fixture(scope="module")
def expected(glm_checkpoint, tmp_path_factory):
    from transformers import GlmMoeDsaForCausalLM

    fields = {"quantization_config": None, "num_nextn_predict_layers": 0}
    floats = changed(glm_checkpoint, tmp_path_factory.mktemp("floats"), dequantise, **fields)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    theirs = GlmMoeDsaForCausalLM.from_pretrained(floats, **options).eval()
    with torch.no_grad():
        return theirs(TOKENS[None]).logits[0]


@pytest.fixture(scope="module")
def exact(glm_checkpoint):
    return load_model(glm_checkpoint, dtype=torch.float32, dequantize=True, progress=False)


@torch.no_grad()
def test_dequantised_fp8_weights_give_the_same_logits(exact, expected):
    assert_same(exact(TOKENS, WHOLE, all_tokens=True), expected)
    assert_same(paged_run(exact, TOKENS, [7, 130, 1, 12], PAGE), expected)


@pytest.fixture(scope="module")
def unrounded_and_fp8_pages(glm_checkpoint, tmp_path_factory):
    """Return models with fp32 and FP8 pages. All tokens have the same experts, so rounding cannot change them."""

    def even(tensors):
        for name in [name for name in tensors if name.endswith(".mlp.gate.weight")]:
            tensors[name].zero_()

    even_routers = changed(glm_checkpoint, tmp_path_factory.mktemp("even"), even)
    options = {"dtype": torch.float32, "dequantize": True, "progress": False}
    return load_model(even_routers, **options), load_model(even_routers, kv_cache="fp8", **options)


@torch.no_grad()
@pytest.mark.parametrize("chunks", [[10], [1] * 10, [150], [125] + [1] * 25], ids=str)
def test_shared_layers_over_fp8_pages_differ_by_rounding(unrounded_and_fp8_pages, chunks):
    """10 tokens are fewer than the 128 keys that a layer selects; decoding over FP8 pages is sparse even so."""
    exact, model = unrounded_and_fp8_pages
    assert model.make_cache(1).layer(2).latent_is_fp8
    tokens = TOKENS[: sum(chunks)]
    unrounded = exact(tokens, SequenceBatch.without_cache([len(tokens)]), all_tokens=True)
    assert 1e-7 < calc_diff(paged_run(model, tokens, chunks, PAGE), unrounded) < 2e-3


@torch.no_grad()
def test_a_quantised_model_differs_by_rounding(glm_checkpoint, exact):
    model = load_model(glm_checkpoint, progress=False)
    shared = model.config.indexer_types.index("shared")
    layers = [model.model.layers[i].self_attn for i in (0, shared)]
    assert layers[0].q_b_proj.weight.dtype == torch.float8_e4m3fn and not layers[0].q_b_proj.use_ue8m0
    assert layers[0].indexer.quantize and layers[1].indexer is None
    assert model.make_cache(1).layer(0).index_is_fp8 and model.make_cache(1).layer(shared).index is None
    # The upper bound is large, because rounding also changes some choices of the random routers.
    assert 1e-6 < calc_diff(*(m(TOKENS, WHOLE, all_tokens=True) for m in (model, exact))) < 0.1


def test_an_indexer_in_a_shared_layer_is_unexpected(glm_checkpoint, exact, tmp_path):
    types = [*exact.config.indexer_types[:1], "shared", *exact.config.indexer_types[2:]]
    assert exact.config.indexer_types[1] == "full"
    changed(glm_checkpoint, tmp_path, indexer_types=types, index_topk_freq=None)
    with pytest.raises(CheckpointError, match=r"unexpected model\.layers\.1\.self_attn\.indexer\.k_norm\.bias"):
        load_model(tmp_path, progress=False)
