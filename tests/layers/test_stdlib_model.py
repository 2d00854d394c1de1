"""The checkpoint that comes with dsa: its sizes, card, recorded loss and acceptance, held-out text, and demo."""

import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsa_layers import SHIPPED_MODEL, Generator, SamplingParams, SequenceBatch, Tokenizer, load_model, read_config
from dsa_layers.command.main import main
from dsa_layers.command.parser import HELD_OUT_TEXT

ROOT = Path(__file__).parent.parent.parent
METRICS = json.loads((SHIPPED_MODEL / "metrics.json").read_text(encoding="utf-8"))
CARD = (SHIPPED_MODEL / "README.md").read_text(encoding="utf-8")


def test_the_file_is_small_and_kernels_take_its_sizes():
    assert (SHIPPED_MODEL / "model.safetensors").stat().st_size < 4_000_000
    config = read_config(SHIPPED_MODEL)
    assert config.quantization.scale_fmt == "ue8m0"
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.v_head_dim) == (512, 64, 128)
    assert (config.index_n_heads, config.index_head_dim) == (8, 128)


def test_the_card_names_the_licence_of_the_data():
    assert "PSF-2.0" in METRICS["data"]["licence"] and METRICS["data"]["licence"] in CARD
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in (SHIPPED_MODEL / "LICENSE.python.txt").read_text("utf-8")
    texts = (SHIPPED_MODEL / "LICENSE.packages.txt").read_text("utf-8")
    trained_on = [package for package in METRICS["data"]["packages"] if package["files"]]
    assert trained_on
    for package in trained_on:
        assert f"{package['name']} {package['version']}" in texts
        assert f"| {package['name']} | {package['version']} | {package['licence']} |" in CARD


def test_the_loss_of_a_held_out_text_is_the_recorded_one():
    model = load_model(SHIPPED_MODEL, progress=False)
    tokenizer = Tokenizer(SHIPPED_MODEL)
    tokens = torch.tensor(tokenizer.encode(METRICS["sample"]["text"]))
    assert tokens[0] == tokenizer.bos_token_id and len(tokens) > 4 * model.config.index_topk
    with torch.no_grad():
        logits = model(tokens[:-1], SequenceBatch.without_cache([len(tokens) - 1]), all_tokens=True)
    loss = torch.nn.functional.cross_entropy(logits, tokens[1:]).item()
    # bf16 sums depend on their order, so an indexer may select other keys on another CPU.
    assert loss == pytest.approx(METRICS["sample"]["loss"], abs=0.01)


@pytest.mark.slow
def test_as_many_drafts_are_taken_as_its_card_says():
    model = load_model(SHIPPED_MODEL, dtype=torch.float32, dequantize=True, drafter=True, progress=False)
    tokenizer, prompt = Tokenizer(SHIPPED_MODEL), HELD_OUT_TEXT.read_text("utf-8")[:1000]
    found = []
    for drafts in (0, 1):
        generator = Generator(model, tokenizer, cache_tokens=1024, draft_tokens=drafts)
        found.append(generator.generate([prompt], SamplingParams(100))[0].tokens)
    assert found[0] == found[1]
    throughput = generator.throughput
    assert throughput.taken / throughput.drafted > METRICS["acceptance"]["right"][0] - 0.2 > 0.2


def test_the_demo_runs_it(monkeypatch, capsys):
    """Run the commands of `make demo` on a CPU, with fewer tokens. In fp32, drafts must change no token."""
    recipe = subprocess.run(["make", "--dry-run", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    generations = re.findall(r"^(printf .*) \| \.venv/bin/dsa (generate [^>\n]*)", recipe, re.M)
    texts = []
    for prompt, generate in generations:
        given = subprocess.run(["sh", "-c", prompt], capture_output=True, check=True).stdout
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        assert main([*shlex.split(generate), "--max-tokens", "3", "--device", "cpu", "--dtype", "float32"]) == 0
        captured = capsys.readouterr()
        assert captured.out.startswith(given.decode())
        assert "tokens/s" in captured.err and ("; drafts: " in captured.err) == ("--draft" in generate)
        texts.append(captured.out)
    assert len(texts) == 2 and texts[0] == texts[1] and "--draft" in generations[1][1]
    (compare,) = re.findall(r"^\.venv/bin/dsa (compare.*)", recipe, re.M)
    assert main([*shlex.split(compare), "--max-tokens", "64", "--length", "64", "--device", "cpu"]) == 0
    assert "dense, all keys" in capsys.readouterr().out


def test_the_text_of_the_comparison_is_held_out():
    excerpt = METRICS["data"]["held_out_excerpt"]
    assert excerpt in METRICS["data"]["held_out_files"] and f"`{excerpt}`" in CARD
    assert HELD_OUT_TEXT.is_relative_to(SHIPPED_MODEL) and 20_000 <= HELD_OUT_TEXT.stat().st_size < 30_000


def test_the_documents_have_its_figures():
    table = CARD.partition("Held-out language loss")[2]
    assert table and table in (ROOT / "docs" / "how-to" / "train-an-indexer.md").read_text("utf-8")
    assert (ROOT / "docs" / "pictures" / "indexer-training.png").exists()
