"""`dsa_bench.e2e.accuracy` with a small model on a CPU. The peers in these tests replace none of our ops."""

import json
import shutil

import pytest
import torch

from dsa_bench.e2e import accuracy
from dsa_bench.e2e.held_out_text import held_out_files, held_out_sequences
from dsa_bench.e2e.peers import Replaced
from dsa_layers import SHIPPED_MODEL, Tokenizer


@pytest.fixture
def checkpoint(tmp_path):
    """Return a copy of the shipped model. This Python has only one of the two files of held-out text."""
    folder = shutil.copytree(SHIPPED_MODEL, tmp_path / "model")
    data = {"held_out_files": ["this.py"], "packages": [{"held_out_files": ["gone/away.py"]}]}
    (folder / "metrics.json").write_text(json.dumps({"data": data}))
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 32}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_held_out_text_is_cut_without_overlap_after_a_bos_token(checkpoint):
    (path,) = held_out_files(checkpoint)
    tokenizer = Tokenizer(checkpoint)
    sequences = held_out_sequences(checkpoint, tokenizer, 32)
    assert {(len(sequence), sequence[0]) for sequence in sequences} == {(33, tokenizer.bos_token_id)}
    joined = [token for sequence in sequences for token in sequence[1:]]
    whole = [tokenizer.bos_token_id, *tokenizer.encode(path.read_text(), add_bos=False)]
    assert joined == whole[: len(joined)] and len(whole) - len(joined) < 32
    (checkpoint / "metrics.json").write_text("{}")
    with pytest.raises(ValueError, match=r"metrics.json must list held-out files, got KeyError"):
        held_out_sequences(checkpoint, tokenizer, 32)


def test_intervals_of_a_ratio_are_paired():
    values = torch.rand(50, dtype=torch.float64) + 1
    assert accuracy.interval(values * 1.5, values) == pytest.approx([1.5] * 3)
    mean, low, high = accuracy.interval(values)
    assert mean == values.mean().item()
    half = 1.96 * values.std().item() / 50**0.5
    assert (low, high) == (pytest.approx(mean - half, abs=half / 3), pytest.approx(mean + half, abs=half / 3))


def test_rows_have_the_figures_of_every_kind_of_kernel(checkpoint, monkeypatch):
    """The errors are equal because nothing is replaced and because fp16 accumulation has no effect on a CPU."""
    peers = Replaced(ops={"fp8_mqa_logits": "a library"})
    monkeypatch.setattr(accuracy, "replacement", lambda: peers)
    half, single, theirs = accuracy.rows([checkpoint], most=2, device="cpu")
    assert [row["kernels"] for row in (half, single, theirs)] == [*accuracy.KERNELS, "peers"]
    assert half["error"] == theirs["error"] and 0 < half["error"][1] <= half["error"][0] <= half["error"][2] < 0.2
    assert half["over_peers"] == pytest.approx([1.0] * 3) and theirs["over_peers"] is None
    assert half["tokens"] == 64 and 0.5 < half["same_first"] <= 1 and half["divergence"][0] > 0

    peers.values.append((accuracy, "an_absent_attribute", None))
    half, _, theirs = accuracy.rows([checkpoint], most=1, device="cpu")
    assert theirs["figure"].startswith("failed: ") and half["over_peers"] is None


def test_a_difference_is_its_formulas():
    logits, expected = torch.randn(2, 5, 7, dtype=torch.float64)
    targets = torch.randint(7, (5,))
    found = accuracy.Difference.between(logits, expected, targets)
    q, p = logits.log_softmax(-1), expected.log_softmax(-1)
    own, theirs = (-x[torch.arange(5), targets] for x in (q, p))
    assert found.loss == pytest.approx(own.mean().item()) and found.expected_loss == pytest.approx(theirs.mean().item())
    assert found.divergence == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item())
    assert found.largest == pytest.approx((own - theirs).abs().max().item())
    assert found.same_first == (logits.argmax(-1) == expected.argmax(-1)).double().mean().item()
