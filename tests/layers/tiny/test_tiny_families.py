"""The tiny checkpoints of all families: what they hold, and that everything runs on them."""

import json

import pytest
import torch

from dsa import dequantize_per_block
from dsa_layers.command import main as cli
from dsa_layers.families.config import read_config
from dsa_layers.families.parts import QuantizationConfig
from dsa_layers.families.registry import family, model_types
from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.io.directory import Checkpoint
from dsa_layers.io.fp4 import dequantize_fp4
from dsa_layers.io.loading import load_model
from dsa_layers.io.tokenizer import Tokenizer
from dsa_layers.tiny import write_tiny_checkpoint
from tests.layers.tiny.files import content, tensors

FAMILIES = model_types()
# Tokens beyond what one selects, and beyond two entries of 128.
PROMPT = [2 + i * i % 2000 for i in range(290)]


def scale_name(model, weight):
    return weight.removesuffix("weight") + "scale" if model == "deepseek_v4" else f"{weight}_scale_inv"


def test_glm_config(tiny_checkpoint):
    config = read_config(tiny_checkpoint("glm_moe_dsa"))
    assert (config.kv_lora_rank, config.qk_rope_head_dim) == (512, 64)
    assert (config.qk_nope_head_dim, config.v_head_dim) == (192, 256)
    assert (config.index_n_heads, config.index_head_dim) == (32, 128)
    assert config.indexer_types == ("full", "full", "shared", "full", "shared")
    assert (config.first_k_dense_replace, config.num_nextn_predict_layers) == (1, 1)
    assert config.index_topk < len(PROMPT)
    assert config.quantization == QuantizationConfig(None, "fp8")


def test_v4_config(tiny_checkpoint):
    config = read_config(tiny_checkpoint("deepseek_v4"))
    assert (config.head_dim, config.qk_rope_head_dim, config.sliding_window) == (512, 64, 128)
    assert (config.index_n_heads, config.index_head_dim) == (64, 128)
    assert [config.compress_rates.get(kind, 0) for kind in config.layer_types] == [0, 4, 128, 4]
    assert config.hash_layers == (True, False, False, False) and config.num_nextn_predict_layers == 1
    assert config.num_attention_heads >= 8 and config.index_topk < len(PROMPT) // 4
    assert config.quantization == QuantizationConfig("ue8m0", "fp4")


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("model", FAMILIES)
def test_holds_exactly_the_published_tensors(tiny_checkpoint, model, quantized):
    directory = tiny_checkpoint(model, quantized)
    found = Checkpoint(directory).tensors
    stored = {name: (info.shape, info.dtype) for name, info in found.items()}
    config = read_config(directory)
    assert stored == family(model).manifest(config)
    assert (config.quantization is not None) == quantized
    dtypes = {dtype for _, dtype in stored.values()}
    kept = {"BF16", "F32"} | ({"I64"} if model == "deepseek_v4" else set())
    of_weights = {"F8_E4M3"} | ({"I8", "F8_E8M0"} if model == "deepseek_v4" else set())
    assert dtypes == (kept | of_weights if quantized else kept)


@pytest.mark.parametrize("model", FAMILIES)
def test_shards_keep_a_weight_with_its_scale(tiny_checkpoint, model):
    stored = Checkpoint(tiny_checkpoint(model)).tensors
    assert len({info.file for info in stored.values()}) > 1
    for name, info in stored.items():
        if info.dtype in ("F8_E4M3", "I8"):
            assert stored[scale_name(model, name)].file == info.file, name


@pytest.mark.parametrize("model", FAMILIES)
def test_unquantised_weights_are_the_same(tiny_checkpoint, model):
    quantized, weights = tensors(tiny_checkpoint(model)), tensors(tiny_checkpoint(model, False))
    for name, weight in weights.items():
        assert weight.isfinite().all() and weight.float().square().mean() > 1e-4, name
        q, scale = quantized[name], quantized.get(scale_name(model, name))
        if q.dtype == torch.int8:
            # FP4's values lie up to 2 scales of at most amax / 3 apart; BF16 rounds the other side.
            worth = dequantize_fp4(q, scale)
            step = weight.float().unflatten(1, (-1, 32)).abs().amax(-1).repeat_interleave(32, 1) / 3
            assert ((worth - weight.float()).abs() <= step * 1.01).all(), name
            assert torch.nn.functional.cosine_similarity(worth.flatten(), weight.float().flatten(), 0) > 0.99, name
        elif q.dtype == torch.float8_e4m3fn:
            torch.testing.assert_close(
                dequantize_per_block(q, scale.float()), weight.float(), rtol=2**-4 + 2**-8, atol=1e-4
            )
        else:
            assert torch.equal(q, weight), name


def test_glm_scales_are_no_powers_of_two(tiny_checkpoint):
    scales = [t for name, t in tensors(tiny_checkpoint("glm_moe_dsa")).items() if name.endswith("_scale_inv")]
    assert all((s.log2() != s.log2().round()).any() for s in scales)


def test_hash_table(tiny_checkpoint):
    """Every token has experts of its own, different ones, and every expert has tokens."""
    table = tensors(tiny_checkpoint("deepseek_v4"))["layers.0.ffn.gate.tid2eid"]
    assert table.shape == (2048, 2) and (table[:, 0] != table[:, 1]).all()
    assert table.unique().tolist() == list(range(8))


@pytest.mark.parametrize("model", FAMILIES)
def test_same_seed_same_bytes(tiny_checkpoint, model, tmp_path):
    """Whatever family's checkpoint was there before; another seed changes the weights alone."""
    other = FAMILIES[FAMILIES.index(model) - 1]
    write_tiny_checkpoint(tmp_path, model=other, seed=1)
    found, expected = content(tmp_path), content(tiny_checkpoint(other))
    weights = {name for name in found if name.endswith(".safetensors")}
    assert {name for name in found if found[name] != expected[name]} == weights
    write_tiny_checkpoint(tmp_path, model=model)
    assert content(tmp_path) == content(tiny_checkpoint(model))


@pytest.mark.parametrize(
    ("quantized", "dequantize"),
    [(True, False), (True, True), pytest.param(False, False, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("model", FAMILIES)
def test_generates(tiny_checkpoint, model, quantized, dequantize):
    loaded = load_model(tiny_checkpoint(model, quantized), dequantize=dequantize, progress=False)
    fp8 = any(parameter.dtype == torch.float8_e4m3fn for parameter in loaded.parameters())
    assert fp8 == (quantized and not dequantize)
    logits = []
    loaded.register_forward_hook(lambda module, inputs, output: logits.append(output))
    generator = Generator(loaded, cache_tokens=512, prefill_chunk=150)
    (done,) = generator.generate([PROMPT], SamplingParams(max_tokens=3))
    assert all(step.shape == (1, 2048) and step.isfinite().all() for step in logits)
    # The last chunk of the prompt gives the first token.
    assert len(logits) == 2 + 2 and [step.argmax().item() for step in logits[1:]] == done.tokens
    # Logits that spread: the text is noise, but not of one token.
    assert all(1 < step.std() < 4 for step in logits[1:])


def test_the_command_writes_the_same(tmp_path, tiny_checkpoint, capsys):
    directory = tmp_path / "tiny"
    assert cli.main(["tiny", str(directory), "--model", "glm_moe_dsa"]) == 0
    assert capsys.readouterr().out == f"wrote {directory}\n"
    assert content(directory) == content(tiny_checkpoint("glm_moe_dsa"))


def test_tokenizer_knows_the_context(tiny_checkpoint):
    for model in FAMILIES:
        fields = json.loads((tiny_checkpoint(model) / "tokenizer_config.json").read_text())
        assert fields["model_max_length"] == read_config(tiny_checkpoint(model)).max_position_embeddings
        tokenizer = Tokenizer(tiny_checkpoint(model))
        assert (tokenizer.eos_token_id, read_config(tiny_checkpoint(model)).eos_token_ids) == (1, (1,))


def test_an_unknown_model(tmp_path):
    with pytest.raises(ValueError, match=r"^model: must be one of 'deepseek_v32', .*'glm_moe_dsa', got 'llama'$"):
        write_tiny_checkpoint(tmp_path / "new", model="llama")
    assert not (tmp_path / "new").exists()


def test_the_chat_template_knows_whether_to_think(tiny_checkpoint):
    tokenizer = Tokenizer(tiny_checkpoint("glm_moe_dsa"))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Q"}])
    for thinks, mark in ((True, "<think>"), (False, "</think>")):
        asked = tokenizer.apply_chat_template([{"role": "user", "content": "Q"}], enable_thinking=thinks)
        assert asked == prompt + mark
