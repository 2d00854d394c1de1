import json
import math
import os
import re

import pytest
import torch
from safetensors.torch import load_file

from dsa import dequantize_per_block
from dsa_layers.checkpoint import INDEX_NAME, Checkpoint
from dsa_layers.families.config import read_config
from dsa_layers.families.deepseek_v32.manifest import deepseek_v32_tensor_manifest
from dsa_layers.families.parts import QuantizationConfig, YarnConfig
from dsa_layers.generation.tokenizer import Tokenizer
from dsa_layers.tiny import tokenizer as tiny_tokenizer
from dsa_layers.tiny import write_tiny_checkpoint, writer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(directory)
    return directory


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    directory = tmp_path_factory.mktemp("plain")
    write_tiny_checkpoint(directory, quantized=False)
    return directory


def content(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def tensors(directory):
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_config(tiny, plain):
    config = read_config(tiny)
    # What the kernels are made for, and a model that has every kind of layer.
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim) == (
        512,
        64,
        128,
        128,
    )
    assert (config.index_n_heads, config.index_head_dim) == (64, 128)
    assert (config.num_hidden_layers, config.first_k_dense_replace, config.num_nextn_predict_layers) == (4, 1, 1)
    assert config.rope.yarn == YarnConfig(40.0, 4096, 32.0, 1.0, 1.0, 1.0)
    assert config.max_position_embeddings == 163840
    assert (config.bos_token_id, config.eos_token_ids) == (0, (1,))
    assert config.quantization == QuantizationConfig((128, 128), "ue8m0")
    assert read_config(plain).quantization is None
    fields = json.loads((tiny / "config.json").read_text())
    assert "rope_scaling" in fields and "torch_dtype" in fields and "rope_parameters" not in fields


@pytest.mark.parametrize("which", ["tiny", "plain"])
def test_holds_exactly_the_published_tensors(which, request):
    directory = request.getfixturevalue(which)
    stored = {name: (info.shape, info.dtype) for name, info in Checkpoint(directory).tensors.items()}
    assert stored == deepseek_v32_tensor_manifest(read_config(directory))
    assert any(name.startswith("model.layers.4.shared_head") for name in stored)


def test_shards(tiny):
    files = sorted(path.name for path in tiny.glob("*.safetensors"))
    count = len(files)
    assert count > 1
    assert files == [f"model-{i:05d}-of-{count:06d}.safetensors" for i in range(1, count + 1)]
    index = json.loads((tiny / INDEX_NAME).read_text())
    sizes = [info.size for info in Checkpoint(tiny).tensors.values()]
    assert index["metadata"]["total_size"] == sum(sizes) < 50e6
    weight_map = index["weight_map"]
    scales = [name for name in weight_map if name.endswith("_scale_inv")]
    assert scales and all(weight_map[name] == weight_map[name.removesuffix("_scale_inv")] for name in scales)


def test_values(tiny, plain):
    for name, tensor in tensors(tiny).items():
        assert tensor.float().isfinite().all(), name
        if name.endswith("_scale_inv"):
            assert torch.equal(tensor.log2(), tensor.log2().round()), name
    for name, tensor in tensors(plain).items():
        values = tensor.float()
        gain = values.std() * math.sqrt(tensor.shape[-1])
        if tensor.ndim == 1:
            assert values.std() > 0.02 and abs(values.mean() - int(name.endswith("norm.weight"))) < 0.1, name
        elif "embed_tokens" in name:
            assert values.std() == pytest.approx(1, rel=0.05), name
        else:
            assert gain == pytest.approx(2 if "head.weight" in name else 1, rel=0.05), name


def test_unquantised_weights_are_the_same(tiny, plain):
    quantized, weights = tensors(tiny), tensors(plain)
    assert weights.keys() == {name for name in quantized if not name.endswith("_scale_inv")}
    for name, weight in weights.items():
        if quantized[name].dtype == weight.dtype:
            assert torch.equal(quantized[name], weight), name
        else:
            dequantised = dequantize_per_block(quantized[name], quantized[f"{name}_scale_inv"])
            # Half a step of e4m3's three bits, plus BF16's rounding of the other side.
            torch.testing.assert_close(dequantised, weight.float(), rtol=2**-4 + 2**-8, atol=1e-4)


def test_same_seed_same_bytes(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "train_tokenizer", tiny_tokenizer.train_tokenizer)  # one of its own
    write_tiny_checkpoint(tmp_path / "again")
    assert content(tmp_path / "again") == content(tiny)
    write_tiny_checkpoint(tmp_path / "again", seed=1)
    other = content(tmp_path / "again")
    changed = {name for name, data in content(tiny).items() if other[name] != data}
    assert changed == {name for name in other if name.endswith(".safetensors")}


def test_tokenizer(tiny):
    tokenizer = Tokenizer(tiny)
    assert tokenizer.vocab_size == read_config(tiny).vocab_size == 2048
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    text = "The lightning indexer scores 128 heads — naïve 😀\n\tdef f(x): return x"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and len(ids) < len(text.encode()) * 0.7
    prompt = tokenizer.apply_chat_template([{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}])
    assert prompt == "<｜begin▁of▁sentence｜>S<｜User｜>Q<｜Assistant｜>"
    assert tokenizer.decode(tokenizer.encode(prompt)) == "SQ" and len(tokenizer.encode(prompt)) == 5
    answered = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    expected = "<｜begin▁of▁sentence｜><｜User｜>Q<｜Assistant｜>A<｜end▁of▁sentence｜>"
    assert tokenizer.apply_chat_template(answered, add_generation_prompt=False) == expected
    with pytest.raises(ValueError, match="role tool is not supported"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])


def test_corpus_is_the_repository_or_the_package(tmp_path, monkeypatch):
    for name in ("README.md", "docs/a.md", "dsa/b.py", "dsa_layers/tiny/tokenizer.py", "other/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(tiny_tokenizer, "__file__", str(tmp_path / "dsa_layers" / "tiny" / "tokenizer.py"))
    installed = [path.relative_to(tmp_path).as_posix() for path in tiny_tokenizer._corpus()]
    assert installed == ["dsa_layers/tiny/tokenizer.py"]
    (tmp_path / "pyproject.toml").touch()
    cloned = [path.relative_to(tmp_path).as_posix() for path in tiny_tokenizer._corpus()]
    assert cloned == ["README.md", "docs/a.md", "dsa/b.py", "dsa_layers/tiny/tokenizer.py"]


@pytest.mark.parametrize("present", ["notes.txt", "config.json", "model.safetensors", "sub/file"])
def test_refuses_a_directory_with_anything_else(tmp_path, present):
    (tmp_path / present).parent.mkdir(exist_ok=True)
    (tmp_path / present).write_text("{}")
    before = present.split("/")[0]
    with pytest.raises(FileExistsError, match=re.escape(f"{tmp_path}: holds {before!r}, which is not part of a tiny")):
        write_tiny_checkpoint(tmp_path)
    assert os.listdir(tmp_path) == [before]


def test_refuses_a_file_beside_a_tiny_checkpoint(tiny, tmp_path):
    for name, data in content(tiny).items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "model-final.safetensors").write_bytes(b"dear")
    before = content(tmp_path)
    with pytest.raises(FileExistsError, match=r"holds 'model-final\.safetensors'"):
        write_tiny_checkpoint(tmp_path)
    assert content(tmp_path) == before


def test_refuses_a_checkpoint_of_another_writer(tiny, tmp_path):
    for name, data in content(tiny).items():
        (tmp_path / name).write_bytes(data)
    index = json.loads((tiny / INDEX_NAME).read_text())
    del index["metadata"]["writer"]
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(FileExistsError, match=r"accepted: a new or empty directory, or one with nothing but a tiny"):
        write_tiny_checkpoint(tmp_path)


def test_replaces_its_own_and_what_an_interruption_left(tmp_path, monkeypatch, plain):
    write_tiny_checkpoint(tmp_path / "made" / "here")
    directory = tmp_path / "made" / "here"

    def stop(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writer, "save_file", stop)
        with pytest.raises(KeyboardInterrupt):
            write_tiny_checkpoint(directory)
    assert INDEX_NAME in os.listdir(directory) and "config.json" not in os.listdir(directory)
    write_tiny_checkpoint(directory, quantized=False)
    assert content(directory) == content(plain)
