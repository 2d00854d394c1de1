"""Train with examples/train_indexer.py in two processes, and compare with one process."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from indexer_training import stages  # noqa: E402
from indexer_training.corpus import Corpus  # noqa: E402
from indexer_training.small_model import build  # noqa: E402
from indexer_training.stages import ALONE, STAGES, train_stage  # noqa: E402
from indexer_training.vocabulary import train_tokenizer  # noqa: E402

from dsa_layers.parallel.ranks import Ranks  # noqa: E402
from tests.layers.parallel.processes import in_ranks  # noqa: E402
from tests.tiny_training import FIELDS, TinyPlan, measure_little, text_of, write_corpus  # noqa: E402

SCRIPT = ROOT / "tests" / "tiny_training.py"
MODEL = FIELDS | {"vocab_size": TinyPlan.vocab, "max_position_embeddings": TinyPlan.length}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("library")
    write_corpus(root)
    return root


@pytest.fixture(scope="module")
def tokens(root):
    with pytest.MonkeyPatch.context() as patch:
        measure_little(patch.setattr)
        text = text_of(root)
    return Corpus.of(text, train_tokenizer(text.train, TinyPlan.vocab)).train


class Noting:
    """Stands in for the optimizer: it records the gradients and leaves the weights unchanged. A real optimizer would
    turn rounding errors of gradients into full-size updates."""

    gradients = None

    def __init__(self, parameters, rate):
        self._parameters = parameters

    def step(self, step, steps):
        Noting.gradients = {name: p.grad.clone() for name, p in self._parameters.items()}


def steps_of_stages(ranks, tokens):
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "Optimizer", Noting)
        for name in STAGES:
            torch.manual_seed(0)
            model = build(MODEL, torch.float32)
            for parameter in model.parameters():
                if not parameter.any():  # a zero weight would make the gradients of earlier layers zero
                    torch.nn.init.normal_(parameter, std=0.02)
            (losses,), _ = train_stage(model, name, TinyPlan((1, 1, 1)), tokens, ranks=ranks)
            found[name] = losses, Noting.gradients
    return found


def test_two_ranks_have_the_losses_and_gradients_of_one(tokens):
    """Two ranks sum over a step's tokens in another order. So gradients differ by fp32 rounding errors, about 1e-6 of
    their norm."""
    alone, both = steps_of_stages(ALONE, tokens), in_ranks(2, steps_of_stages, tokens)
    for name, (losses, gradients) in alone.items():
        whole = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        first, second = (of_stages[name] for of_stages in both)
        assert first[0] == second[0]
        for loss in ("language", "drafted", "indexer"):
            assert getattr(first[0], loss) == pytest.approx(getattr(losses, loss), rel=1e-4), (name, loss)
        assert gradients.keys() == first[1].keys() and whole > 0
        for parameter, gradient in gradients.items():
            assert torch.equal(first[1][parameter], second[1][parameter]), (name, parameter)
            error = (first[1][parameter] - gradient).norm()
            assert error <= 1e-4 * gradient.norm() + 1e-6 * whole, (name, parameter)


@pytest.mark.slow
def test_the_command_trains_in_two_processes(root, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPT), str(root), "out"]
    options = ["--device", "cpu", "--steps", "2", "2", "2", "--config", json.dumps(FIELDS)]
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Held-out language loss") == 1
    rows = list(csv.DictReader((tmp_path / "out" / "losses.csv").open()))
    assert [row["stage"] for row in rows] == [name for name in STAGES for _ in range(2)]
    weights = torch.load(tmp_path / "out" / "weights.pt")
    assert weights.keys() == build(MODEL, torch.float32).state_dict().keys()
    metrics = json.loads((tmp_path / "out" / "model" / "metrics.json").read_text())
    assert metrics["processes"] == 2
    assert "On 2 x CPU; losses" in (tmp_path / "out" / "table.md").read_text()


def test_the_dense_stage_needs_a_sequence_for_each_rank(tokens):
    plan = TinyPlan(batch=(3, 1, 1))
    model = build(FIELDS | {"vocab_size": plan.vocab}, torch.float32)
    with pytest.raises(ValueError, match=r"^batch: the dense stage needs a sequence for each of 4 ranks, got 3$"):
        train_stage(model, "dense", plan, tokens, ranks=Ranks(0, 4))
