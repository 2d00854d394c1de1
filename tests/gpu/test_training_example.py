"""examples/train_indexer.py on a GPU, with the model that it trains, short sequences and few steps."""

import csv
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_indexer
from indexer_training import stages
from indexer_training.corpus import Corpus
from indexer_training.passes import Passes
from indexer_training.small_model import build
from indexer_training.vocabulary import train_tokenizer

from tests.tiny_training import measure_little, text_of, write_corpus

pytestmark = pytest.mark.filterwarnings("ignore:.*has no Hopper kernel yet")
PLAN = stages.Plan((24, 8, 8), rates=(1e-2, 3e-3, 3e-4), batch=(4, 2, 2), every=(8, 4, 4), length=256, vocab=300)
MODEL = {"vocab_size": PLAN.vocab, "max_position_embeddings": PLAN.length}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    root = tmp_path_factory.mktemp("library")
    write_corpus(root)
    with pytest.MonkeyPatch.context() as patch:
        measure_little(patch.setattr)
        return text_of(root)


def test_captured_steps_have_the_losses_of_steps_as_they_are(text, monkeypatch):
    """Tokens, the drafter's weight and the experts' biases change from step to step: a graph that kept one of the first
    step's would part from the others."""
    tokens = Corpus.of(text, train_tokenizer(text.train, PLAN.vocab)).train.cuda()
    runs = []
    for captured in (True, False):
        monkeypatch.setattr(stages, "Passes", lambda *parts, captured, own=captured: Passes(*parts, captured and own))
        torch.manual_seed(0)
        model = build(MODEL, torch.bfloat16).cuda()
        rows, _ = stages.train_stage(model, "dense", PLAN, tokens)
        runs.append((rows, model))
    (graph, of_graph), (single, of_single) = runs
    assert single[-1].language < single[0].language - 1
    for one, other in zip(graph, single):
        assert (one.language, one.drafted) == pytest.approx((other.language, other.drafted), rel=1e-2), one.step
    for (name, one), other in zip(of_graph.named_parameters(), of_single.parameters()):
        assert (one - other).norm() <= 0.1 * other.norm() + 1e-3, name


def test_all_stages(text, tmp_path, monkeypatch):
    measure_little(monkeypatch.setattr)
    monkeypatch.setattr(train_indexer, "LOSS_BYTES", 4000)  # sequences are longer than on a CPU
    metrics = train_indexer.run(tmp_path, PLAN, "cuda", text)
    rows = list(csv.DictReader((tmp_path / "losses.csv").open()))
    assert [row["stage"] for row in rows] == [name for name, n in zip(stages.STAGES, PLAN.steps) for _ in range(n)]
    for column in ("language loss", "drafter's loss"):
        values = [float(row[column]) for row in rows if row["stage"] == "dense"]
        assert values[-1] < values[0] - 1, column
    assert float(rows[-1]["indexer loss"]) < float(rows[PLAN.steps[0]]["indexer loss"])
    losses = metrics["held_out"]["loss"]["library"]
    assert losses["sparse, top-k, FP8"] == pytest.approx(losses["sparse, top-k"], rel=0.02)
    assert (
        json.loads((tmp_path / "model" / "metrics.json").read_text())["held_out"]["loss"] == metrics["held_out"]["loss"]
    )
