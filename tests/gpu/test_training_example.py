"""Run examples/train_indexer.py on a GPU with short sequences and few steps."""

import copy
import csv
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_indexer
from indexer_training import stages
from indexer_training.corpus import Corpus, draw
from indexer_training.passes import Passes
from indexer_training.small_model import build
from indexer_training.vocabulary import train_tokenizer

from tests.tiny_training import measure_little, text_of, write_corpus

pytestmark = pytest.mark.filterwarnings("ignore:.*has no Hopper kernel yet")
PLAN = stages.Plan(
    (24, 8, 8), rates=(1e-2, 3e-3, 3e-4), batch=(4, 2, 2), every=(8, 4, 4), length=256, vocab=300, held_out=4000
)
MODEL = {"vocab_size": PLAN.vocab, "max_position_embeddings": PLAN.length}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    root = tmp_path_factory.mktemp("library")
    write_corpus(root)
    with pytest.MonkeyPatch.context() as patch:
        measure_little(patch.setattr)
        return text_of(root)


def test_a_captured_pass_is_the_same_as_it_is(text):
    """Parameters, tokens and the losses' weights differ in every call, so a graph that kept old values would not agree.
    The captured model's parameters are copied to the other model, so differences do not accumulate.
    """
    tokens = Corpus.of(text, train_tokenizer(text.train, PLAN.vocab)).train.cuda()
    models = [build(MODEL, torch.bfloat16).cuda()]
    for name, parameter in models[0].named_parameters():
        if "o_proj" in name or "down_proj" in name:
            torch.nn.init.normal_(parameter, std=0.02)  # with the initial zeros a block has no gradients
    models.append(copy.deepcopy(models[0]))
    learnt = [
        {n: p for n, p in model.named_parameters() if p.requires_grad and ".indexer." not in n} for model in models
    ]
    passes = [
        Passes(stages._Losses(model, None, stages.ALONE), own.values(), captured)
        for model, own, captured in zip(models, learnt, (True, False))
    ]
    generator = torch.Generator("cuda").manual_seed(0)
    for call in range(8):
        # PyTorch's gradient of an embedding sorts the tokens if there are many, as in 16 sequences.
        drawn = draw(tokens, 16, PLAN.length, generator)
        weights = torch.rand(3, generator=generator, device="cuda")
        losses = []
        for model, own in zip(models, passes):
            with stages.selecting(model, PLAN.length):
                losses.append(own(drawn, weights))
        torch.testing.assert_close(*losses, rtol=2e-3, atol=1e-6)
        for name, parameter in learnt[0].items():
            other = learnt[1][name].grad
            assert other.norm() > 0, name
            assert (parameter.grad - other).norm() <= 0.02 * other.norm(), (call, name)
        with torch.no_grad():
            for one, other in zip(*(model.parameters() for model in models)):
                one += 0.02 * torch.randn(one.shape, generator=generator, device="cuda").to(one.dtype)
                other.copy_(one)


def test_all_stages(text, tmp_path, monkeypatch):
    measure_little(monkeypatch.setattr)
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
