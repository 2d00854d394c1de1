"""The whole-model benchmark's rows as a table, CSV and picture, and the peers' ops in their places."""

import csv
import sys
import types

import pytest
import torch

import dsa
from dsa_bench.e2e import peers, plot, report, table
from dsa_bench.e2e.parts import PARTS
from dsa_bench.e2e.runs import Run
from dsa_layers.cli import main

PARTS_MS = dict(zip(PARTS, (0.5, 0.25, 2.0, 4.0, 0.25)))
ROW = {"model": "V3.2", "run": "decode 8 x 4096", "tokens": 8, "ms": 8.0, "parts": PARTS_MS}
ALONE = ROW | {"peer_ms": None, "peer_parts": None}
BESIDE = ROW | {"peer_ms": 10.0, "peer_parts": PARTS_MS | {"top-k": 1.0}}


def test_lines():
    assert table.head().index("tokens/s") < table.head().index("indexer")
    assert " 1000 |" in table.line(ALONE) and table.line(ALONE).endswith("no peer")
    assert table.line(BESIDE).endswith("1.25 (indexer 1.00, top-k 4.00, attention 1.00)")


def test_csv_and_picture(tmp_path):
    table.write_csv([ALONE, BESIDE], tmp_path / "rows.csv")
    alone, beside = csv.DictReader((tmp_path / "rows.csv").open())
    assert float(beside["peers' top-k ms"]) == 1.0 and alone["peers' top-k ms"] == alone["peers' ms"] == ""
    assert float(alone["MoE ms"]) == 4.0 and float(alone["tokens/s"]) == 1000.0
    plot.write_png([ALONE, BESIDE, BESIDE | {"model": "V4-Flash"}], tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_peers_take_the_ops_places_and_give_them_back(monkeypatch):
    ours = dsa.fp8_mqa_logits, dsa.topk_indices, dsa.fp8_gemm_nt
    fake = types.SimpleNamespace(
        fp8_mqa_logits=lambda *a, **o: "theirs",
        fp8_gemm_nt=lambda a, b, out: out.fill_(7),
    )
    monkeypatch.setattr(peers, "_deep_gemm", lambda: fake)
    monkeypatch.setattr(peers, "_flash_mla", lambda: None)
    monkeypatch.setitem(sys.modules, "peer_topk", None)
    with pytest.raises(KeyError), peers.peer_kernels() as replaced:
        assert set(replaced) == {
            *("fp8_mqa_logits", "fp8_gemm_nt", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata")
        }
        assert dsa.fp8_mqa_logits() == "theirs" and dsa.topk_indices is ours[1]
        product = dsa.fp8_gemm_nt((torch.zeros(2, 3), None), (torch.zeros(5, 3), None), torch.float32)
        assert torch.equal(product, torch.full((2, 5), 7.0))
        raise KeyError
    assert (dsa.fp8_mqa_logits, dsa.topk_indices, dsa.fp8_gemm_nt) == ours


def test_rows_leave_out_what_does_not_fit(monkeypatch):
    """Every prompt and step gets a row, with the peers' where there are some, but one for which the memory is short."""

    def decode(model, count, context):
        if context == 64:
            raise torch.OutOfMemoryError("too much")
        return Run(lambda: None, lambda: None)

    monkeypatch.setattr(report, "stack", lambda name: name)
    monkeypatch.setattr(report, "prefill", lambda model, tokens, chunk: Run(lambda: None, lambda: None))
    monkeypatch.setattr(report, "decode", decode)
    monkeypatch.setattr(report, "milliseconds", lambda run, repeats: 2.0)
    monkeypatch.setattr(report, "gpu_ms", lambda model, run: PARTS_MS)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for name in ("_deep_gemm", "_flash_mla"):
        monkeypatch.setattr(peers, name, lambda: None)
    monkeypatch.setitem(sys.modules, "peer_topk", None)
    rows = list(report.rows(["V3.2"], prompts=[32], steps=[(1, 32), (2, 64)]))
    assert [(r["run"], r["tokens"], r["peer_ms"]) for r in rows] == [
        ("prefill 32", 32, None),
        ("decode 1 x 32", 1, None),
    ]


def test_the_command_needs_a_gpu(capsys):
    assert main(["bench", "e2e"]) == 2 and "needs a Hopper GPU" in capsys.readouterr().err
    assert main(["bench", "e2e", "--profile"]) == 2 and "--profile: is for one op" in capsys.readouterr().err
