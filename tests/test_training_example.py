"""examples/train_indexer.py in a small configuration: every stage, what it measures and what it writes."""

import csv
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import train_indexer  # noqa: E402
from indexer_training import report  # noqa: E402
from indexer_training.corpus import BEGIN, draw, pieces, read_corpus  # noqa: E402
from indexer_training.measure import recall  # noqa: E402
from indexer_training.small_model import build, byte_tokenizer, fields  # noqa: E402
from indexer_training.stages import Plan, selecting, train_stage  # noqa: E402

from dsa_layers.checkpoint.export import save_fp8_checkpoint  # noqa: E402
from dsa_layers.checkpoint.loading import load_model  # noqa: E402
from dsa_layers.generation.generator import Generator  # noqa: E402
from dsa_layers.generation.sampling import SamplingParams  # noqa: E402
from dsa_layers.generation.tokenizer import Tokenizer  # noqa: E402

SMALL = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "index_topk": 32}
PLAN = Plan(steps=(12, 6, 6), rates=(2e-3, 3e-3, 3e-4), batch=(2, 2, 2), length=96, fields=SMALL)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Some of this repository's files as the library."""
    root = tmp_path_factory.mktemp("library")
    for i, path in enumerate(sorted((ROOT / "dsa" / "reference").rglob("[!_]*.py"))[:22]):
        (root / f"file{i:02}.py").write_text(path.read_text())
    (root / "test").mkdir()
    (root / "test" / "left_out.py").write_text("x = 1\n" * 100)
    (root / "short.py").write_text("x = 1\n")
    return read_corpus(root, sample_bytes=256)


@pytest.fixture(scope="module")
def out(corpus, tmp_path_factory):
    """A run that measures on few sequences: on a CPU that takes longer than its training."""
    directory = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_indexer, "RECALL_SEQUENCES", 4)
        patch.setattr(train_indexer, "LOSS_SEQUENCES", 8)
        train_indexer.run(directory, PLAN, "cpu", corpus)
    return directory


def test_files_are_held_out_whole(corpus):
    facts = corpus.facts()
    assert facts["train_files"] == 21 and facts["held_out_files"] == ["file10.py"]
    assert int((corpus.train == BEGIN).sum()) == 21 and int((corpus.held_out == BEGIN).sum()) == 1
    text = bytes(corpus.held_out[1:].tolist()).decode()
    assert text.startswith(corpus.sample) and len(corpus.sample) == 256
    assert "PSF" in facts["licence"]
    # One file is held out, and it is shorter than an excerpt should be.
    assert corpus.excerpt == ("file10.py", text)


def test_sequences(corpus):
    drawn = draw(corpus.train, 5, 40, torch.Generator().manual_seed(0))
    assert drawn.shape == (5, 41) and drawn.dtype == torch.int64 and (drawn[:, 0] == BEGIN).all()
    whole = pieces(corpus.held_out, 40)
    assert torch.equal(whole[:, 1:].flatten(), corpus.held_out[: whole[:, 1:].numel()].long())


def test_tokens_are_bytes():
    tokenizer = byte_tokenizer()
    text = "def f(x):\n\treturn 'é€' # 漢\r\x00"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text
    assert tokenizer.get_vocab_size() == 257


def test_who_learns_when(corpus):
    torch.manual_seed(0)
    model = build(SMALL, torch.float32)
    plan = Plan(steps=(1, 1, 1), batch=(1, 1, 1), length=64, fields=SMALL)
    for name, in_indexers, elsewhere in (("dense", False, True), ("warmup", True, False), ("sparse", True, True)):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        train_stage(model, name, plan, corpus.train)
        changed = {n: not torch.equal(p, before[n]) for n, p in model.named_parameters()}
        assert any(changed[n] for n in changed if ".indexer." in n) == in_indexers, name
        assert any(changed[n] for n in changed if ".indexer." not in n) == elsewhere, name
        assert all(p.requires_grad for n, p in model.named_parameters() if "correction_bias" not in n)


def test_losses_fall(out):
    rows = list(csv.DictReader((out / "losses.csv").open()))
    assert [row["stage"] for row in rows] == ["dense"] * 12 + ["warmup"] * 6 + ["sparse"] * 6
    language = [float(row["language loss"]) for row in rows]
    assert language[11] < language[0] - 1
    indexer = [float(row["indexer loss"]) for row in rows]
    assert not any(indexer[:12]) and indexer[-1] < indexer[12]


def test_metrics(out):
    metrics = json.loads((out / "model" / "metrics.json").read_text())
    losses = metrics["held_out"]["loss"]
    assert losses["warmup, all keys"] == losses["dense, all keys"]
    assert [step for step, _ in metrics["held_out"]["while_dense"]] == list(range(12))
    assert abs(losses["sparse, top-k, FP8"] - losses["sparse, top-k"]) < 0.02
    for shares in metrics["recall"].values():
        for chosen, best, random in zip(shares["indexer"], shares["oracle"], shares["random"]):
            assert 0 < random < best <= 1 and chosen <= best + 1e-6


def test_what_is_written(out, corpus):
    metrics = json.loads((out / "model" / "metrics.json").read_text())
    text = report.tables(metrics, list(csv.DictReader((out / "losses.csv").open())))
    assert text.count("nan") == 0 and f"{metrics['held_out']['loss']['sparse, top-k, FP8']:.4f}" in text
    assert (out / "model" / "held_out.txt").read_text() == corpus.excerpt[1]
    assert (out / "losses.png").stat().st_size > 10_000
    assert (out / "table.md").read_text() == text
    assert (out / "model" / "README.md").read_text() == report.card(metrics, text)
    document = f"a\n{report.BEGIN_MARK}\nold\n{report.END_MARK}\nb\n"
    assert report.fill(document, text) == document.replace("old\n", text)


def test_the_checkpoint_generates(out):
    model = load_model(out / "model", progress=False)
    generator = Generator(model, Tokenizer(out / "model"), cache_tokens=512)
    prompt = "import torch\n" * 4  # more than it selects
    (done,) = generator.generate([prompt], SamplingParams(max_new_tokens=5))
    assert done.prompt_tokens == 1 + len(prompt)


def test_recall_of_known_indexers(corpus):
    """An indexer that scores nothing takes the first keys; with as many keys as there are, none chooses."""
    torch.manual_seed(0)
    model = build(SMALL, torch.float32)
    tokens = pieces(corpus.held_out, 64)[:1]
    for parameter in (p for n, p in model.named_parameters() if n.endswith("weights_proj.weight")):
        torch.nn.init.zeros_(parameter)
    shares = recall(model, tokens, 63, dense=True)
    # One token sees 64 keys: at its best it leaves out the least one.
    assert all(best > 1 - 1 / 64 for best in shares.oracle)
    assert shares.random == pytest.approx([63 / 64] * 2)


def test_selecting_is_undone():
    model = build(SMALL, torch.float32)
    with selecting(model, 7):
        assert {layer.self_attn.indexer.top_k for layer in model.model.layers} == {7}
    assert {layer.self_attn.indexer.top_k for layer in model.model.layers} == {32}


def test_export_refuses(tmp_path):
    model = build(SMALL, torch.float32)
    with pytest.raises(ValueError, match="fields: must have a quantization_config"):
        save_fp8_checkpoint(model, tmp_path, fields(SMALL, quantized=False))
    with pytest.raises(ValueError, match=r"fields: model.layers.0.mlp.gate_proj.weight has shape \[128, 256\], the mo"):
        save_fp8_checkpoint(model, tmp_path, fields(SMALL | {"intermediate_size": 128}, quantized=True))
