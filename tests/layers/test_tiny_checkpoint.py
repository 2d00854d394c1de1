"""Tests of the tiny checkpoints of all families: their files and tensors, generation, and tokenizers."""

import json

import pytest
import torch

from dsa import dequantize_per_block
from dsa.reference import dequantize_fp4
from dsa_layers import Generator, SamplingParams, Tokenizer, load_model, read_config, write_tiny_checkpoint
from dsa_layers.command import main as cli
from dsa_layers.io.chat_template import FORMATS
from dsa_layers.io.directory import INDEX_NAME, Checkpoint
from dsa_layers.io.published import published_manifest
from dsa_layers.models.family import family
from dsa_layers.models.registry import FAMILIES
from tests.layers.io.stand_ins import read_tensors

# 290 tokens: more than index_topk, and enough for two of DeepSeek-V4's entries of 128 tokens.
PROMPT = [2 + i * i % 2000 for i in range(290)]
QUESTION = [{"role": "user", "content": "Q"}]
KERNEL_SIZES = {"kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim", "sliding_window"}
KERNEL_SIZES |= {"index_n_heads", "index_head_dim"}


def scale_name(model, weight):
    return weight.removesuffix("weight") + "scale" if model == "deepseek_v4" else f"{weight}_scale_inv"


@pytest.mark.parametrize("model", FAMILIES)
def test_dimensions_that_kernels_depend_on_are_the_published_ones(tiny_checkpoint, model):
    assert not KERNEL_SIZES & family(model).tiny.changes.keys()
    config = read_config(tiny_checkpoint(model))
    assert config.index_topk < len(PROMPT)
    assert config.num_nextn_predict_layers == (family(model).drafter is not None)
    assert config.eos_token_ids == (1,)


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("model", FAMILIES)
def test_holds_exactly_the_published_tensors(tiny_checkpoint, model, quantized):
    directory = tiny_checkpoint(model, quantized)
    found = Checkpoint(directory).tensors
    stored = {name: info._replace(file="") for name, info in found.items()}
    config = read_config(directory)
    assert stored == published_manifest(config)
    assert (config.quantization is not None) == quantized
    kept = {"BF16", "F32"} | ({"I64"} if model == "deepseek_v4" else set())
    of_weights = {"F8_E4M3"} | ({"I8", "F8_E8M0"} if model == "deepseek_v4" else set())
    assert {info.dtype for info in stored.values()} == (kept | of_weights if quantized else kept)
    index = json.loads((directory / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == sum(info.size for info in found.values()) < 100e6
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    for name, info in found.items():
        if info.dtype in ("F8_E4M3", "I8"):
            assert found[scale_name(model, name)].file == info.file, name


@pytest.mark.parametrize("model", FAMILIES)
def test_unquantised_weights_are_the_same(tiny_checkpoint, model):
    quantized, weights = read_tensors(tiny_checkpoint(model)), read_tensors(tiny_checkpoint(model, False))
    for name, weight in weights.items():
        assert weight.isfinite().all() and weight.float().square().mean() > 1e-4, name
        q, scale = quantized[name], quantized.get(scale_name(model, name))
        if q.dtype == torch.int8:
            # FP4 values are up to 2 scales apart, so rounding errs by at most 1 scale. A scale is amax / 6 rounded up
            # to a power of two, so less than amax / 3. The factor 1.01 is for `weight`, which is rounded to BF16.
            step = weight.float().unflatten(1, (-1, 32)).abs().amax(-1).repeat_interleave(32, 1) / 3
            assert ((dequantize_fp4(q, scale) - weight.float()).abs() <= step * 1.01).all(), name
        elif q.dtype == torch.float8_e4m3fn:
            values = dequantize_per_block(q, scale.float())
            torch.testing.assert_close(values, weight.float(), rtol=2**-4 + 2**-8, atol=1e-4)  # rounding to e4m3, BF16
            powers = torch.equal(scale.float().log2(), scale.float().log2().round())
            assert powers == read_config(tiny_checkpoint(model)).use_ue8m0, name
        else:
            assert torch.equal(q, weight), name


@pytest.mark.parametrize("model", FAMILIES)
def test_the_bytes_follow_from_the_seed_which_changes_the_weights_alone(tiny_checkpoint, model, tmp_path):
    assert cli.main(["tiny", str(tmp_path / "same"), "--model", model]) == 0
    write_tiny_checkpoint(tmp_path / "other", model=model, seed=1)
    directories = tiny_checkpoint(model), tmp_path / "same", tmp_path / "other"
    expected, same, other = ({path.name: path.read_bytes() for path in one.iterdir()} for one in directories)
    assert same == expected
    weights = {name for name in other if name.endswith(".safetensors")}
    assert {name for name in other if other[name] != expected[name]} == weights


UNQUANTISED = pytest.param(False, False, marks=pytest.mark.slow)


@pytest.mark.parametrize(("quantized", "dequantize"), [(True, False), (True, True), UNQUANTISED])
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
    # The prompt takes two chunks. The second gives the first token, and two decoding passes give the others.
    assert len(logits) == 2 + 2 and [step.argmax().item() for step in logits[1:]] == done.tokens
    # Logits spread, but not so much that sampling would always give one token.
    assert all(1 < step.std() < 4 for step in logits[1:])


@pytest.mark.parametrize("model", FAMILIES)
def test_the_tokenizer_takes_any_text_and_has_the_family_s_chat_format(tiny_checkpoint, model):
    directory = tiny_checkpoint(model)
    config, tokenizer = read_config(directory), Tokenizer(directory)
    assert tokenizer.vocab_size == config.vocab_size == 2048
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    fields = json.loads((directory / "tokenizer_config.json").read_text())
    assert fields["model_max_length"] == config.max_position_embeddings
    assert ("chat_template" in fields) == (model not in FORMATS)  # FORMATS: families published without a template
    text = "The lightning indexer scores 128 heads — naïve 😀\n\tdef f(x): return x"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and len(ids) < len(text.encode()) * 0.7
    prompt = tokenizer.apply_chat_template([{"role": "system", "content": "S"}, *QUESTION])
    assert tokenizer.decode(tokenizer.encode(prompt)).startswith("SQ")
    for thinks, mark in ((True, "<think>"), (False, "</think>")):
        assert tokenizer.apply_chat_template(QUESTION, enable_thinking=thinks).endswith(f"<｜Assistant｜>{mark}")
