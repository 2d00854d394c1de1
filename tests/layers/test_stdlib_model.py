"""The checkpoint that comes with dsa: its size and card, its recorded loss, its text, and the commands that run it."""

import io
import json
import re
import shlex
import string
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsa_layers import SHIPPED_MODEL
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.checkpoint.loading import load_model
from dsa_layers.command.compare import HELD_OUT_TEXT
from dsa_layers.command.main import main
from dsa_layers.families.config import read_config
from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.generation.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent.parent
METRICS = json.loads((SHIPPED_MODEL / "metrics.json").read_text())


@pytest.fixture(scope="module")
def model():
    return load_model(SHIPPED_MODEL, progress=False)


def test_size_and_format():
    assert (SHIPPED_MODEL / "model.safetensors").stat().st_size < 4_000_000
    config = read_config(SHIPPED_MODEL)
    assert config.quantization.weight_block == (128, 128) and config.quantization.scale_fmt == "ue8m0"
    # What the kernels take.
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.v_head_dim) == (512, 64, 128)
    assert (config.index_n_heads, config.index_head_dim) == (8, 128)


def test_the_card_names_the_licence_of_the_data():
    assert "PSF-2.0" in METRICS["data"]["licence"]
    assert METRICS["data"]["licence"] in (SHIPPED_MODEL / "README.md").read_text()
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in (SHIPPED_MODEL / "LICENSE.python.txt").read_text()


def test_the_recorded_loss(model):
    """Of a held-out text, of which most tokens see more keys than are selected."""
    tokenizer = Tokenizer(SHIPPED_MODEL)
    tokens = torch.tensor(tokenizer.encode(METRICS["sample"]["text"]))
    assert tokens[0] == tokenizer.bos_token_id and len(tokens) > 4 * model.config.index_topk
    with torch.no_grad():
        logits = model(tokens[:-1], SequenceBatch.without_cache([len(tokens) - 1]), all_tokens=True)
    loss = torch.nn.functional.cross_entropy(logits, tokens[1:]).item()
    # bf16 sums in another order now and then pick another key.
    assert loss == pytest.approx(METRICS["sample"]["loss"], abs=0.01)


def test_its_text(model):
    """Beyond the keys that it selects: words, in lines, of letters that Python has."""
    generator = Generator(model, Tokenizer(SHIPPED_MODEL), cache_tokens=1024)
    (done,) = generator.generate(["class Queue:\n"], SamplingParams(250, temperature=0.6, seed=1))
    printable = sum(letter in string.printable for letter in done.text)
    assert len(done.tokens) > model.config.index_topk and printable > 0.98 * len(done.text)
    assert done.text.count("\n") > 2 and any(
        word in done.text.split() for word in ("def", "return", "if", "the", "self")
    )


def test_generate_without_a_directory_runs_it(capsys):
    assert main(["generate", "--prompt", "def f(", "--max-new-tokens", "4", "--device", "cpu"]) == 0
    assert len(capsys.readouterr().out) > 1


def test_the_demo_runs_it(monkeypatch, capsys):
    """The Makefile's commands, but for how much they write and read."""
    recipe = subprocess.run(["make", "--dry-run", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    prompt, generate, compare = re.search(
        r"^(printf .*) \| \.venv/bin/dsa (.*)\n\.venv/bin/dsa (.*)", recipe, re.M
    ).groups()
    given = subprocess.run(["sh", "-c", prompt], capture_output=True, check=True).stdout
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
    assert main([*shlex.split(generate), "--max-new-tokens", "3", "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(given.decode()) and "keys read: " in captured.err
    assert main([*shlex.split(compare), "--max-tokens", "64", "--length", "64", "--device", "cpu"]) == 0
    assert "dense, all keys" in capsys.readouterr().out


def test_the_text_of_the_comparison_is_held_out():
    assert METRICS["data"]["held_out_excerpt"] in METRICS["data"]["held_out_files"]
    assert HELD_OUT_TEXT.is_relative_to(SHIPPED_MODEL) and "PSF" in (SHIPPED_MODEL / "README.md").read_text()
    assert f"`{METRICS['data']['held_out_excerpt']}`" in (SHIPPED_MODEL / "README.md").read_text()
    assert 20_000 <= HELD_OUT_TEXT.stat().st_size < 30_000


def test_the_documents_have_its_figures():
    """As examples/indexer_training/report.py writes them."""
    table = (SHIPPED_MODEL / "README.md").read_text().partition("Held-out language loss")[2]
    assert table and table in (ROOT / "docs" / "indexer-training.md").read_text()
    assert (ROOT / "docs" / "indexer-training.png").exists()
