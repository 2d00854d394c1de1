import json
import os
import re
import shutil

import pytest
import torch

from dsa_layers.families.config import read_config
from dsa_layers.families.parts import QuantizationConfig, YarnConfig
from dsa_layers.io.directory import INDEX_NAME, Checkpoint
from dsa_layers.io.tokenizer import Tokenizer
from dsa_layers.tiny import tokenizer as tiny_tokenizer
from dsa_layers.tiny import write_tiny_checkpoint, writer
from tests.layers.tiny.files import content, tensors


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint):
    return tiny_checkpoint("deepseek_v32")


@pytest.fixture(scope="module")
def plain(tiny_checkpoint):
    return tiny_checkpoint("deepseek_v32", False)


def test_config(tiny, plain):
    config = read_config(tiny)
    # What the kernels are made for, and a model that has every kind of layer.
    sizes = config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim
    assert sizes == (512, 64, 128, 128)
    assert (config.index_n_heads, config.index_head_dim) == (64, 128)
    assert (config.num_hidden_layers, config.first_k_dense_replace, config.num_nextn_predict_layers) == (4, 1, 1)
    assert config.rope.yarn == YarnConfig(40.0, 4096, 32.0, 1.0, 1.0, 1.0)
    assert config.max_position_embeddings == 163840
    assert (config.bos_token_id, config.eos_token_ids) == (0, (1,))
    assert config.quantization == QuantizationConfig("ue8m0", "fp8")
    assert read_config(plain).quantization is None
    fields = json.loads((tiny / "config.json").read_text())
    assert "rope_scaling" in fields and "torch_dtype" in fields and "rope_parameters" not in fields


def test_shards(tiny):
    files = sorted(path.name for path in tiny.glob("*.safetensors"))
    count = len(files)
    assert count > 1
    assert files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    index = json.loads((tiny / INDEX_NAME).read_text())
    sizes = [info.size for info in Checkpoint(tiny).tensors.values()]
    assert index["metadata"]["total_size"] == sum(sizes) < 50e6


def test_scales_are_powers_of_two(tiny):
    for name, tensor in tensors(tiny).items():
        assert tensor.float().isfinite().all(), name
        if name.endswith("_scale_inv"):
            assert torch.equal(tensor.log2(), tensor.log2().round()), name


def test_a_tokenizer_is_trained_to_the_same_bytes_again(tiny):
    tokenizer = tiny_tokenizer.train_tokenizer(read_config(tiny).vocab_size)
    assert json.loads(tokenizer.to_str()) == json.loads((tiny / "tokenizer.json").read_text())


def test_tokenizer(tiny):
    tokenizer = Tokenizer(tiny)
    assert tokenizer.vocab_size == read_config(tiny).vocab_size == 2048
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    text = "The lightning indexer scores 128 heads — naïve 😀\n\tdef f(x): return x"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and len(ids) < len(text.encode()) * 0.7
    prompt = tokenizer.apply_chat_template([{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}])
    assert prompt == "<｜begin▁of▁sentence｜>S<｜User｜>Q<｜Assistant｜></think>"
    assert tokenizer.decode(tokenizer.encode(prompt)) == "SQ</think>"


def test_chat_templates_are_where_releases_have_them(tiny, tiny_checkpoint):
    assert "chat_template" not in json.loads((tiny / "tokenizer_config.json").read_text())
    prompt = Tokenizer(tiny_checkpoint("glm_moe_dsa")).apply_chat_template([{"role": "user", "content": "Q"}])
    assert prompt == "<｜begin▁of▁sentence｜><｜User｜>Q<｜Assistant｜>"


def test_corpus_is_the_repository_or_the_package(tmp_path, monkeypatch):
    files = ["README.md", "docs/a.md", "dsa/b.py", "dsa_layers/tiny/tokenizer.py", "other/c.py"]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(tiny_tokenizer, "__file__", str(tmp_path / "dsa_layers" / "tiny" / "tokenizer.py"))
    for expected in (files[3:4], files[:4]):
        found = [path.relative_to(tmp_path).as_posix() for path in tiny_tokenizer._corpus()]
        assert found == expected
        (tmp_path / "pyproject.toml").touch()  # now it is a clone of the repository


@pytest.mark.parametrize("present", ["notes.txt", "config.json", "model.safetensors", "sub/file"])
def test_refuses_a_directory_with_anything_else(tmp_path, present):
    (tmp_path / present).parent.mkdir(exist_ok=True)
    (tmp_path / present).write_text("{}")
    before = present.split("/")[0]
    with pytest.raises(FileExistsError, match=re.escape(f"{tmp_path}: holds {before!r}, which is not part of a tiny")):
        write_tiny_checkpoint(tmp_path)
    assert os.listdir(tmp_path) == [before]


def test_refuses_a_directory_that_holds_more_than_a_tiny_checkpoint(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model-final.safetensors").write_bytes(b"dear")
    before = content(tmp_path)
    with pytest.raises(FileExistsError, match=r"holds 'model-final\.safetensors'"):
        write_tiny_checkpoint(tmp_path)
    assert content(tmp_path) == before


def test_refuses_a_checkpoint_of_another_writer(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    index = json.loads((tiny / INDEX_NAME).read_text())
    del index["metadata"]["writer"]
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(FileExistsError, match=r"accepted: a new or empty directory, or one with nothing but a tiny"):
        write_tiny_checkpoint(tmp_path)


def test_replaces_its_own_and_what_an_interruption_left(tmp_path, monkeypatch, plain):
    directory = tmp_path / "made" / "here"
    write_tiny_checkpoint(directory)

    def stop(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writer, "save_tensors", stop)
        with pytest.raises(KeyboardInterrupt):
            write_tiny_checkpoint(directory)
    assert INDEX_NAME in os.listdir(directory) and "config.json" not in os.listdir(directory)
    write_tiny_checkpoint(directory, quantized=False)
    assert content(directory) == content(plain)
