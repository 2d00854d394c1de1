"""Rows of prompts and steps, with fake times and logits in place of a GPU and a model."""

import json
from functools import partial

import pytest
import torch

import dsa
from dsa.testing import calc_diff
from dsa_bench.e2e import report, stacks
from dsa_bench.e2e.parts import PARTS
from dsa_bench.e2e.runs import Run

PARTS_MS = dict.fromkeys(PARTS, 0.5)
OURS, THEIRS = torch.tensor([4.0, 5.0]), torch.tensor([4.0, 5.5])


class Machine:
    """Replaces a GPU and a model. A pass takes 2 ms, and 3 ms with the peers' kernels."""

    def __init__(self, monkeypatch):
        self.theirs, self.error = THEIRS, None
        self.made, self.compiled = [], []
        self.passes, self.with_peers = [], []
        monkeypatch.setattr(report, "stack", lambda name: self.made.append(name) or torch.nn.Linear(1, 1))
        monkeypatch.setattr(report, "prefill", lambda model, count, tokens, chunk: self.run())
        monkeypatch.setattr(report, "decode", self.decode)
        monkeypatch.setattr(report, "bench", self.bench)
        monkeypatch.setattr(report, "gpu_ms", self.parts)
        monkeypatch.setattr(report, "linear_shapes", lambda model: [(256, 128)])
        monkeypatch.setattr(report, "compile_products", self.compiled.extend)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def bench(self, calls, *, repeats):
        for call in calls.values():
            call()
        return dict(zip(calls, (2.0, 3.0)))

    def run(self):
        return Run(partial(self.logits, "timed"), partial(self.logits, "launched"), self.run)

    def logits(self, kind):
        on_peers = isinstance(dsa.topk_indices, partial)
        if on_peers and self.error:
            raise self.error
        self.passes.append(kind)
        self.with_peers.append(on_peers)
        return self.theirs if on_peers else OURS

    def decode(self, model, count, context):
        if context == 64:
            raise torch.OutOfMemoryError("too much")
        return self.run()

    def parts(self, model, call):
        call()
        return PARTS_MS


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def test_every_run_but_those_that_do_not_fit_in_memory_has_a_row(machine, no_peers):
    rows = list(report.rows(["V3.2"], prompts=[(1, 32), (3, 4000)], steps=[(1, 32), (2, 64)]))
    assert [(r["shape"], r["tokens"], r["ms"], r["tokens/s"], r["peer_ms"], r["peers"]) for r in rows] == [
        ("V3.2 prefill 32", 32, 2.0, 16000.0, None, []),
        ("V3.2 prefill 3 x 4000", 12000, 2.0, 6e6, None, []),
        ("V3.2 decode 1 x 32", 1, 2.0, 500.0, None, []),
    ]
    # A compiled product has as many rows as a pass has tokens. Prompts of 12000 tokens take passes of 8192 and 3808.
    assert sorted(machine.compiled) == [(m, 256, 128) for m in (1, 2, 32, 3808, 8192)]


def test_runs_that_are_done_are_left_out_and_models_without_other_runs_are_not_made(machine, no_peers):
    choice = {"models": ["V3.2", "GLM-5"], "prompts": [(1, 32)], "steps": [(1, 32)]}
    done = ["V3.2 prefill 32", "V3.2 decode 1 x 32", "GLM-5 prefill 32"]
    assert [row["shape"] for row in report.rows(**choice, done=done)] == ["GLM-5 decode 1 x 32"]
    assert machine.made == ["GLM-5"]


def test_passes_with_peers_and_ours_are_timed_by_turns(machine, peers):
    """Before the timing, the peers' run is called three times: to compile, to capture, and to measure its parts."""
    (row,) = report.rows(["V4-Flash"], prompts=[(1, 32)], steps=[])
    assert json.loads(json.dumps(row)) == row and row["shape"] == "V4-Flash prefill 32"
    assert (row["peer_ms"], row["ratio"], row["peer_parts"]) == (3.0, 1.5, PARTS_MS)
    assert row["peer"] == "deepgemm 2.8.1, sgl-flash-mla, torch, vllm" and row["failed"] == {}
    assert row["difference"] == pytest.approx(calc_diff(THEIRS, OURS))
    assert machine.passes == ["launched", "timed", "launched", "timed", "timed", "launched"]
    assert machine.with_peers == [True, True, True, False, True, False]


@pytest.mark.parametrize(
    ("theirs", "error", "reason"),
    [
        *((logits, None, "failed: its logits differ by ") for logits in ([torch.nan, 1.0], [torch.inf, 1], [-5.0, 4])),
        ([4.0, 5.5], RuntimeError("Unsupported h_q\nand more"), "failed: Unsupported h_q"),
    ],
)
def test_a_peers_pass_that_fails_or_computes_something_else_has_no_time(theirs, error, reason, machine, peers):
    machine.theirs, machine.error = torch.tensor(theirs), error
    rows = list(report.rows(["V3.2"], prompts=[(1, 32)], steps=[(1, 32)]))
    assert len(rows) == 2
    for row in rows:
        found = [row[name] for name in ("ms", "peer", "peer_ms", "ratio", "peer_parts", "peers", "difference")]
        assert found == [2.0, None, None, None, None, [], None]
        assert row["failed"]["the pass"].startswith(reason) and "\n" not in row["failed"]["the pass"]


def test_linear_layers_of_a_stack_are_joined_where_they_share_inputs():
    shapes = stacks.linear_shapes(stacks.skeleton("V3.2"))
    # q_a_proj, the indexer's wk and kv_a_proj_with_mqa are one product. So are gate and up.
    assert {(2240, 7168), (36864, 7168), (7168, 16384)} < {*shapes} and not {(1536, 7168), (18432, 7168)} & {*shapes}
    assert all(channels % 128 == 0 for _, channels in shapes)
