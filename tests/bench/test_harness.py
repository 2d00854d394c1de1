"""The harness of benchmarks without a GPU: rows of cases, tables and pictures, host times, and ncu's report."""

import csv
import json
import types

import pytest
import torch

from dsa_bench.harness import calls, case, host, plot, profile, table
from dsa_bench.harness.calls import Peers
from dsa_bench.harness.table import print_table


@pytest.fixture
def timed(monkeypatch):
    """Return a function. timed(name=ms, ...) sets each name's time. It returns a list, to which each later timing adds
    the names that are timed."""

    def takes(**ms):
        names = []

        def bench(calls, *, repeats, graph):
            names.extend(calls)
            return {name: ms[name] for name in calls}

        monkeypatch.setattr(case, "bench", bench)
        return names

    return takes


def a_case(*names, failed=None, **options):
    calls = {name: [lambda: torch.arange(10.0)] for name in ("dsa", *names)}
    return case.Case("shape", calls, lambda ms: f"{ms} ms", Peers(failed=failed or {}), **options)


KINDS = {"baselines": {"torch", "formula"}, "yardsticks": {"FA2"}}


def test_a_row_tells_peers_baselines_and_yardsticks_apart(timed):
    timed(dsa=2.0, slow=4.0, fast=1.0, torch=8.0, formula=9.0, FA2=0.5)
    row = a_case("slow", "torch", "fast", "formula", "FA2", **KINDS, flops={"FA2": 5e11}).row()
    assert row == {
        **{"shape": "shape", "ms": 2.0, "figure": "2.0 ms", "failed": {}},
        "peers": {"slow": {"ms": 4.0, "ratio": 2.0}, "fast": {"ms": 1.0, "ratio": 0.5}},
        **{"peer": "fast", "peer_ms": 1.0, "ratio": 0.5},
        "baselines": {"torch": {"ms": 8.0, "ratio": 4.0}, "formula": {"ms": 9.0, "ratio": 4.5}},
        **{"baseline": "torch", "baseline_ms": 8.0, "baseline_ratio": 4.0},
        "yardsticks": {"FA2": {"ms": 0.5, "ratio": 0.25, "tflops": 1000.0}},
    }
    assert json.loads(json.dumps(row)) == row
    row = a_case().row()
    names = ("peer", "peer_ms", "ratio", "baseline", "baseline_ms", "baseline_ratio")
    assert [row[name] for name in names] == [None] * 6


def test_a_peer_that_fails_has_a_reason_and_does_not_end_the_run(timed):
    names = timed(dsa=2.0, right=3.0)
    one = a_case("right", "raises", "late", "wrong", "asserts", failed={"broken": "failed: no libcuda"})

    def refuse():
        raise RuntimeError("Unsupported h_q: 16\nstack")

    def assert_nothing():
        raise AssertionError

    one.calls["raises"][:] = [refuse]
    one.calls["late"].append(refuse)
    one.calls["wrong"][:] = [lambda: torch.arange(10.0).flip(0)]
    one.calls["asserts"][:] = [assert_nothing]
    row = one.row()
    assert names == ["dsa", "right"] and row["peer"] == "right"
    assert row["failed"].pop("wrong").startswith("differs by 0.")
    assert row["failed"] == {
        "broken": "failed: no libcuda",
        "raises": "failed: Unsupported h_q: 16",
        "late": "failed: Unsupported h_q: 16",
        "asserts": "failed: AssertionError",
    }


def test_our_failure_ends_the_run(timed):
    timed(dsa=2.0)
    one = a_case("peer")
    one.calls["dsa"][:] = [lambda: 1 / 0]
    with pytest.raises(ZeroDivisionError):
        one.row()


@pytest.mark.parametrize(("name", "compared"), [("peer", True), ("torch", True), ("FA2", False)])
def test_peers_and_baselines_are_compared_as_the_case_says(name, compared, timed):
    def never(theirs, ours):
        raise AssertionError("differs: never equal")

    timed(**{"dsa": 1.0, name: 1.0})
    one = a_case(name, **KINDS, agree=never)
    assert one.tried() == one.row()["failed"] == ({name: "differs: never equal"} if compared else {})


def test_peers_are_compared_with_an_expected_result():
    assert a_case("peer").tried(torch.arange(10.0) + 1)["peer"].startswith("differs by")


def test_tables_csv_and_pictures_have_all_names_and_reasons(timed, tmp_path, capsys):
    timed(dsa=2.0, peer=1.0, torch=8.0, FA2=4.0)
    rows = [
        a_case("torch", "FA2", **KINDS, failed={"peer": "failed: no, thanks"}, flops={"FA2": 5e11}).row(),
        a_case("peer", "torch", **KINDS).row(),
    ]
    print_table("op", rows)
    start, no_peer, plain = (
        f"  {'shape':<48}    2.0000 ms  {'2.0 ms':<34} ",
        "no peer",
        "plain: torch 8.0000 ms, ratio 4.00",
    )
    scale = "for scale: FA2 4.0000 ms, 125 TFLOP/s, ratio 2.00"
    assert capsys.readouterr().out.splitlines() == [
        *("", "op"),
        start + " | ".join((no_peer, plain, scale, "peer failed: no, thanks")),
        start + f"peer 1.0000 ms, ratio 0.50 | {plain}",
    ]
    table.write_csv(rows, tmp_path / "rows.csv")
    assert list(csv.reader((tmp_path / "rows.csv").open())) == [
        ["shape", "ms", "figure", "peer ms", "peer ratio", "torch ms", "torch ratio", "FA2 ms", "FA2 ratio"],
        ["shape", "2.0", "2.0 ms", "failed: no, thanks", "", "8.0", "4.0", "4.0", "2.0"],
        ["shape", "2.0", "2.0 ms", "1.0", "0.5", "8.0", "4.0", "", ""],
    ]
    plot.write_png("op", rows, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_a_reason_is_one_line():
    assert calls.reason(RuntimeError("\n one\ntwo")) == "one" and calls.reason(KeyError()) == "KeyError"
    assert len(calls.reason(ValueError("x" * 1000))) == 200


def test_host_times_are_of_ours_and_peers_in_turn_at_a_small_shape(monkeypatch):
    called = []

    def call(name):
        called.append(name)
        return torch.ones(1)

    def one(rows):
        calls = {name: [lambda name=name: call(name)] * 2 for name in ("dsa", "a peer", "plain")}
        return case.Case(f"{rows} rows", calls, str, graph=True, baselines={"plain"})

    def seconds():
        return sum({"dsa": 1e-3, "a peer": 3e-3, "plain": 9.0}[name] for name in called)

    module = types.SimpleNamespace(SHAPES=[(4096,)], PROBED=[(7,)], case=one)
    monkeypatch.setattr(host, "load", {"rms_norm": module}.get)
    monkeypatch.setattr(host, "CALLS", 3)
    monkeypatch.setattr(host, "time", types.SimpleNamespace(perf_counter=seconds))
    (row,) = host.rows(["rms_norm"])
    assert (row["shape"], row["ms"], row["peer"], row["peer_ms"]) == ("rms_norm, 7 rows", 1.0, "a peer", 3.0)
    assert row["figure"] == "1000.0 us" and row["baselines"] == {}
    # Earlier calls are for comparing results, not for timing.
    assert called[-6 * (host.BLOCKS + 1) :] == (["dsa"] * 3 + ["a peer"] * 3) * (host.BLOCKS + 1)


def test_host_times_of_all_ops_begin_with_a_pytorch_call(monkeypatch):
    assert "linear_layers" not in host.ops() and {"rms_norm", "flash_mla_with_kvcache_sparse"} <= {*host.ops()}
    monkeypatch.setattr(host, "ops", list)
    (row,) = host.rows()
    assert row["shape"].startswith("torch.add") and row["ms"] > 0 and row["peer"] is None and row["failed"] == {}


def test_products_are_compiled_before_the_first_case(timed, monkeypatch):
    timed(dsa=1.0)
    module, order = case.load("fp8_gemm_nt"), []
    monkeypatch.setattr(module, "SHAPES", [(1,), (2,)])
    monkeypatch.setattr(module, "prepare", lambda: order.append("prepare"))
    monkeypatch.setattr(module, "case", lambda n: order.append(n) or a_case())
    assert len(case.run("fp8_gemm_nt")) == 2 and order == ["prepare", 1, 2]


def test_ncu_report_shows_each_kernel_once_and_leaves_out_unknown_metrics():
    pipe, issue, *_ = profile.METRICS
    rows = [
        {"Kernel Name": "", "gpu__time_duration.sum": "nsecond", pipe: "%"},
        {"Kernel Name": "a", "gpu__time_duration.sum": "9,000", pipe: "1", issue: "n/a"},
        {"Kernel Name": "a", "gpu__time_duration.sum": "1,500", pipe: "61.4", issue: "n/a"},
        {"Kernel Name": "b", "gpu__time_duration.sum": "2000", pipe: "0", issue: "5"},
    ]
    a, b = profile.ncu_report(rows).splitlines()
    assert a.split() == "1.5 us tensor pipe 61% a".split()
    assert b.split() == "2.0 us tensor pipe 0%, issue slots 5% b".split()


def test_without_ncu_the_profile_says_so(monkeypatch):
    monkeypatch.setattr(profile.shutil, "which", lambda name: None)
    assert profile.ncu_table("fp8_mqa_logits").startswith("ncu is not on the PATH")
