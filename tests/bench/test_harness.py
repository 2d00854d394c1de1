"""Rows, profiles' reports and the tuner, without a GPU."""

import csv
import dataclasses
import json
import pickle
import types
from functools import partial

import pytest
import torch

from dsa.cute import tuning
from dsa.kernels.cache import indexer_cache_sm90
from dsa.kernels.gemm import fp8_gemm_choice, fp8_gemm_config, fp8_gemm_few_rows_config
from dsa.kernels.indexer import fp8_mqa_logits_sm90, fp8_paged_mqa_logits_sm90
from dsa.ops.gemm import fp8_gemm_nt as fp8_gemm_nt_op
from dsa.runtime import backends
from dsa.runtime.op import OPS
from dsa_bench.gemm import _published_layers
from dsa_bench.harness import case, host, plot, profile, table, tune
from dsa_bench.harness.benchmarks import tunable
from dsa_bench.harness.calls import Peers
from dsa_bench.harness.table import print_table

OP = "fp8_mqa_logits"  # that is tuned


@pytest.fixture
def timed(monkeypatch):
    """Call it with milliseconds: what is asked to be timed takes these. It returns the names that are asked for."""

    def takes(**ms):
        asked = []

        def bench(calls, *, repeats, graph):
            asked.extend(calls)
            return {name: ms[name] for name in calls}

        monkeypatch.setattr(case, "bench", bench)
        return asked

    return takes


def a_case(*names, failed=None, **options):
    """Everyone's result is 0, 1, ..., 9."""
    calls = {name: [lambda: torch.arange(10.0)] for name in ("dsa", *names)}
    return case.Case("shape", calls, lambda ms: f"{ms} ms", Peers(failed=failed or {}), **options)


def test_a_row_tells_peers_baselines_and_yardsticks_apart(timed):
    timed(dsa=2.0, slow=4.0, fast=1.0, torch=8.0, formula=9.0, FA2=0.5)
    others = {"baselines": frozenset({"torch", "formula"}), "yardsticks": frozenset({"FA2"})}
    row = a_case("slow", "torch", "fast", "formula", "FA2", **others).row()
    assert (row["shape"], row["ms"], row["figure"], row["failed"]) == ("shape", 2.0, "2.0 ms", {})
    assert row["peers"] == {"slow": {"ms": 4.0, "ratio": 2.0}, "fast": {"ms": 1.0, "ratio": 0.5}}
    assert (row["peer"], row["peer_ms"], row["ratio"]) == ("fast", 1.0, 0.5)
    assert row["baselines"] == {"torch": {"ms": 8.0, "ratio": 4.0}, "formula": {"ms": 9.0, "ratio": 4.5}}
    assert (row["baseline"], row["baseline_ms"], row["baseline_ratio"]) == ("torch", 8.0, 4.0)
    assert row["yardsticks"] == {"FA2": {"ms": 0.5, "ratio": 0.25}}
    assert json.loads(json.dumps(row)) == row


def test_a_row_without_others(timed):
    timed(dsa=2.0, torch=1.0)
    alone, plain = a_case().row(), a_case("torch", baselines=frozenset({"torch"})).row()
    names = ("peer", "ratio", "baseline", "baseline_ratio")
    assert [alone[name] for name in names] == [None] * 4
    assert [plain[name] for name in names] == [None, None, "torch", 0.5]


def test_a_peer_that_fails_is_named_and_does_not_end_the_run(timed, capsys):
    asked = timed(dsa=2.0, right=3.0)
    one = a_case("right", "raises", "late", "wrong", "asserts", failed={"broken": "failed: no libcuda"})

    def refuse():
        raise RuntimeError("Unsupported h_q: 16\nstack")

    def say_nothing():
        raise AssertionError

    one.calls["raises"][:] = [refuse]
    one.calls["late"].append(refuse)
    one.calls["wrong"][:] = [lambda: torch.arange(10.0).flip(0)]
    one.calls["asserts"][:] = [say_nothing]
    row = one.row()
    assert asked == ["dsa", "right"] and row["peer"] == "right"
    assert row["failed"].pop("wrong").startswith("differs by 0.")
    assert row["failed"] == {
        "broken": "failed: no libcuda",
        "raises": "failed: Unsupported h_q: 16",
        "late": "failed: Unsupported h_q: 16",
        "asserts": "failed: AssertionError",
    }
    print_table("op", [row])
    assert "right 3.0000 ms, ratio 1.50 | broken failed: no libcuda | raises failed: Unsup" in capsys.readouterr().out


def test_ours_must_not_fail(timed):
    timed(dsa=2.0)
    one = a_case("peer")
    one.calls["dsa"][:] = [lambda: 1 / 0]
    with pytest.raises(ZeroDivisionError):
        one.row()


def test_peers_are_compared_as_the_case_says(timed):
    timed(dsa=1.0, peer=1.0)

    def never(got, ours):
        raise AssertionError("differs: never alike")

    assert a_case("peer", agree=never).row()["failed"] == {"peer": "differs: never alike"}
    assert a_case("plain", baselines=frozenset({"plain"}), agree=never).tried() == {"plain": "differs: never alike"}
    assert a_case("scale", yardsticks=frozenset({"scale"}), agree=never).tried() == {}
    assert a_case("peer").tried(torch.arange(10.0) + 1)["peer"].startswith("differs by")


def test_one_with_other_work_has_its_rate(timed, capsys):
    timed(dsa=2.0, half=1.0, same=3.0)
    row = a_case("half", "same", flops={"half": 5e11}, yardsticks=frozenset({"half"})).row()
    assert row["yardsticks"] == {"half": {"ms": 1.0, "ratio": 0.5, "tflops": 500.0}}
    assert row["peers"] == {"same": {"ms": 3.0, "ratio": 1.5}}
    print_table("op", [row])
    expected = "same 3.0000 ms, ratio 1.50 | for scale: half 1.0000 ms, 500 TFLOP/s, ratio 0.50"
    assert expected in capsys.readouterr().out


def test_tables_and_pictures_have_everyone(timed, tmp_path, capsys):
    timed(dsa=2.0, peer=1.0, torch=8.0, FA2=4.0)
    kinds = {"baselines": frozenset({"torch"}), "yardsticks": frozenset({"FA2"})}
    rows = [
        a_case("torch", "FA2", **kinds, failed={"peer": "failed: no, thanks"}).row(),
        a_case("peer", "torch", **kinds).row(),
    ]
    print_table("op", rows)
    shown = capsys.readouterr().out
    assert "no peer | plain: torch 8.0000 ms, ratio 4.00 | for scale: FA2 4.0000 ms, ratio 2.00 | peer failed:" in shown
    table.write_csv(rows, tmp_path / "rows.csv")
    first, second = csv.DictReader((tmp_path / "rows.csv").open())
    assert list(first) == [
        "shape",
        "ms",
        "figure",
        *(f"{n} {x}" for n in ("peer", "torch", "FA2") for x in ("ms", "ratio")),
    ]
    assert (first["peer ms"], first["peer ratio"], first["FA2 ratio"]) == ("failed: no, thanks", "", "2.0")
    assert (second["peer ms"], second["torch ratio"], second["FA2 ms"]) == ("1.0", "4.0", "")
    plot.write_png("op", rows, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_a_calls_time_on_the_host(monkeypatch):
    """Of a small shape where there is one, and only of peers: calls take turns, a block each. The clock is one
    that calls set forward: they take 1 and 3 ms."""
    called = []

    def call(name):
        called.append(name)
        return torch.ones(1)

    def one(rows):
        calls = {name: [lambda name=name: call(name)] * 2 for name in ("dsa", "a peer", "plain")}
        return case.Case(f"{rows} rows", calls, str, graph=True, baselines=frozenset(["plain"]))

    def seconds():
        return sum({"dsa": 1e-3, "a peer": 3e-3, "plain": 9.0}[name] for name in called)

    module = types.SimpleNamespace(SHAPES=[(4096,)], PROBED=[(7,)], case=one)
    monkeypatch.setattr(host, "load", {"rms_norm": module}.get)
    monkeypatch.setattr(host, "CALLS", 3)
    monkeypatch.setattr(host, "time", types.SimpleNamespace(perf_counter=seconds))
    (row,) = host.rows(["rms_norm"])
    assert (row["shape"], row["ms"], row["peer"], row["peer_ms"]) == ("rms_norm, 7 rows", 1.0, "a peer", 3.0)
    assert row["figure"] == "1000.0 us" and row["baselines"] == {}
    # Those that compare the results come before.
    assert called[-6 * (host.BLOCKS + 1) :] == (["dsa"] * 3 + ["a peer"] * 3) * (host.BLOCKS + 1)


def test_the_hosts_times_begin_with_a_call_of_pytorchs(monkeypatch):
    monkeypatch.setattr(host, "ops", list)
    (row,) = host.rows()
    assert row["shape"].startswith("torch.add") and row["ms"] > 0 and row["peer"] is None and row["failed"] == {}


def test_the_hosts_time_is_of_every_op():
    assert "linear_layers" not in host.ops() and {"rms_norm", "flash_mla_with_kvcache_sparse"} <= {*host.ops()}


def test_what_compiles_in_parallel_does_so_before_the_first_case(timed, monkeypatch):
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


@pytest.mark.parametrize(
    ("op", "config_type", "classes"),
    [
        (
            "fp8_mqa_logits",
            fp8_mqa_logits_sm90.MqaLogitsConfig,
            {f"heads {h}, dim {d}": h for h in (8, 16, 32, 64) for d in (32, 64, 128)},
        ),
        (
            "fp8_paged_mqa_logits",
            fp8_paged_mqa_logits_sm90.PagedMqaLogitsConfig,
            {f"columns {h * n}": h * n for h in (8, 16, 32, 64) for n in (1, 2, 3, 4)},
        ),
    ],
)
def test_shipped_winners_are_candidates_that_fit(op, config_type, classes):
    everything = tuning.candidates(config_type)
    assert len(everything) == len(set(everything)) > 10
    for name, size in classes.items():
        winner = tuning.tuned(config_type, op, "sm_90", name)
        assert winner in everything and winner.fits(size)
    assert op in OPS and op in tunable()
    assert case.load(op).tuning().classes.keys() == classes.keys()


@pytest.mark.slow
def test_the_search_for_products_is_of_the_published_layers():
    plan = case.load("fp8_gemm_nt").tuning()
    shipped = tuning._data(tuning.path_of("fp8_gemm_nt", "sm_90"))
    assert "fp8_gemm_nt" in tunable() and shipped["winners"].keys() <= plan.classes.keys()
    assert len(plan.classes) == len(fp8_gemm_choice.ROWS) * (len(_published_layers.matrices()) + 1)
    for name, of_class in plan.classes.items():
        tried = [config for config in plan.candidates if of_class.tries(config)]
        assert of_class.modelled in tried and len(tried) < 15, name
        [shape] = of_class.shapes
        assert fp8_gemm_choice.shape_class(*shape[:3]) == name
    # A process that compiles is given the function and its arguments.
    for first in (fp8_gemm_few_rows_config.CONFIGS[0], fp8_gemm_config.ONE_MATRIX_CONFIGS[0]):
        compile_function = pickle.loads(pickle.dumps(plan.candidates[first]))
        assert int(tune._compile(compile_function, ("bfloat16", first))) > 32


def test_data_is_written_where_a_model_is_slower_than_the_fastest():
    trials = [tune.Trial(config, "96", (ms, 1.0)) for config, ms in (("fast", 1.0), ("near", 1.02), ("slow", 1.1))]
    of_class = {name: tune.TuningClass(lambda config: True, {}, name) for name in ("fast", "near", "slow", "another")}
    assert [tune._winner(one, trials) for one in of_class.values()] == [None, None, "fast", "fast"]
    assert tune._winner(tune.TuningClass(lambda config: True, {}), trials) == "fast"


def test_data_is_of_one_gpu_and_of_classes_that_have_a_winner(tmp_path):
    path = tmp_path / "op.json"
    first, second = (fp8_mqa_logits_sm90.MqaLogitsConfig(128, stages, 2) for stages in (3, 4))
    tuning.write("op", {"a": first, "b": second, "c": None}, {"device": "a GPU", "multiprocessors": 132}, path)
    tuning.write("op", {"a": None, "d": first}, {"device": "another GPU", "multiprocessors": 132}, path)
    data = json.loads(path.read_text())
    assert data["device"] == "another GPU"
    assert data["winners"] == {"b": dataclasses.asdict(second), "d": dataclasses.asdict(first)}
    tuning.write("op", {"e": first}, {"device": "a smaller GPU", "multiprocessors": 114}, path)
    assert json.loads(path.read_text())["winners"].keys() == {"e"}


@pytest.mark.parametrize("config", [fp8_gemm_few_rows_config.CONFIGS[0], fp8_gemm_config.ONE_MATRIX_CONFIGS[0]])
def test_an_op_forgets_its_choice_for_a_trial(config):
    choose = partial(fp8_gemm_nt_op._choose_config, 64, 7168, 16384, 132)
    chosen = choose()
    call = tune._under("fp8_gemm_nt", "sm_90", "64 x 7168 x 16384", config, choose)
    assert call() == config != chosen and choose() == chosen


class Gpu:
    """Stands for what the tuner asks of a GPU: a configuration of two stages is the fastest, and wrong."""

    def __init__(self, monkeypatch, arch, folder):
        self.arch, self.called, self.checked, self.timed = arch, None, [], []
        self.path = folder / arch / f"{OP}.json"
        self.path.parent.mkdir()
        monkeypatch.setattr(tuning, "TUNED", folder)
        monkeypatch.setattr(tune, "bench", self.bench)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(backends, "arch_of", lambda device: arch)
        monkeypatch.setattr(backends, "num_sms", lambda device: 78)
        monkeypatch.setattr(case.load(OP), "case", self.case)
        monkeypatch.setattr(OPS[OP], "launches", {arch: OPS[OP].launches["sm_90"]})
        monkeypatch.setattr(tune, "_compile", compile_nothing)
        monkeypatch.setattr(tune.concurrent.futures, "ProcessPoolExecutor", InThisProcess)

    def winners(self):
        return json.loads(self.path.read_text())["winners"]

    def call(self):
        self.called = tuning.tuned(fp8_mqa_logits_sm90.MqaLogitsConfig, OP, self.arch, "heads 8, dim 128")
        return torch.tensor(self.called.stages == 2)

    def case(self, queries, keys, heads, dim):
        def check(wrong):
            self.checked.append(bool(wrong))
            if wrong:
                raise AssertionError("calc_diff 1")

        return case.Case("shape", {"dsa": [self.call]}, lambda ms: f"{ms:.2f}", check=check)

    def bench(self, calls, **options):
        for config, (call,) in calls.items():
            call()
            assert self.called == config
            self.timed.append(config)
        return {config: config.stages + config.groups / 10 for config in calls}


def compile_nothing(compile_function, arguments):
    config = arguments[-1]
    return "fails: spilled" if config.columns == 256 else "96"


class InThisProcess:
    """A process pool whose work runs here."""

    def __init__(self, jobs, mp_context):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def submit(self, function, *arguments):
        future = tune.concurrent.futures.Future()
        future.set_result(tune._compile(*arguments))
        return future


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_the_tuner_keeps_the_fastest_that_is_correct(monkeypatch, tmp_path, capsys, arch):
    """Of the kernels for the GPU at hand, whose data has its arch in its path."""
    gpu = Gpu(monkeypatch, arch, tmp_path)
    whole = case.load(OP).tuning

    def one_class():
        plan = whole()
        return dataclasses.replace(plan, classes={"heads 8, dim 128": plan.classes["heads 8, dim 128"]})

    monkeypatch.setattr(case.load(OP), "tuning", one_class)
    gpu.path.write_text(json.dumps({"winners": {"heads 8, dim 128": {"columns": 1}, "another": {"columns": 2}}}))
    tune.tune(OP)
    data = json.loads(gpu.path.read_text())
    assert data["winners"] == {
        "heads 8, dim 128": {"columns": 128, "stages": 3, "groups": 2},
        "another": {"columns": 2},
    }
    assert data["op"] == OP and data["device"] == "a GPU" and data["multiprocessors"] == 78
    shown = capsys.readouterr().out
    assert "columns 128 stages 3   groups 2      96 registers     3.2000  3.20" in shown
    assert "wrong: calc_diff 1" in shown and "fails: spilled" in shown
    assert len(gpu.timed) > 1 and all(config.stages != 2 and config.columns == 128 for config in gpu.timed)
    # Those whose result is one that was found to be correct are not checked again.
    assert gpu.checked.count(False) == 1 and gpu.checked.count(True) > 1


def first_trial(op, arch, name, registers, cases):
    return [tune.Trial(next(iter(registers)), "96", (1.0,))]


def test_the_tuner_writes_an_archs_first_data(monkeypatch, tmp_path):
    gpu = Gpu(monkeypatch, "sm_100", tmp_path)
    monkeypatch.setattr(tune, "_try_all", first_trial)
    tune.tune(OP)
    assert gpu.winners().keys() == {f"heads {heads}, dim {dim}" for heads in (8, 16, 32, 64) for dim in (32, 64, 128)}


def test_a_search_keeps_what_it_found_before_an_error(monkeypatch, tmp_path):
    gpu, names = Gpu(monkeypatch, "sm_90", tmp_path), []

    def one_then_none(op, arch, name, *rest):
        names.append(name)
        if len(names) > 1:
            raise torch.OutOfMemoryError("no memory")
        return first_trial(op, arch, name, *rest)

    monkeypatch.setattr(tune, "_try_all", one_then_none)
    with pytest.raises(torch.OutOfMemoryError):
        tune.tune(OP)
    assert [*gpu.winners()] == names[:1]


def test_the_tuner_needs_a_kernel_for_the_gpu_at_hand(monkeypatch, tmp_path):
    Gpu(monkeypatch, "sm_90", tmp_path)
    monkeypatch.setattr(backends, "arch_of", lambda device: "sm_100")
    with pytest.raises(ValueError, match="fp8_mqa_logits: has no sm_100 kernel, only those for sm_90"):
        tune.tune(OP)


def test_the_tuner_reports_a_class_without_a_correct_configuration(monkeypatch, tmp_path):
    Gpu(monkeypatch, "sm_90", tmp_path)
    monkeypatch.setattr(tune, "_compile", lambda function, arguments: "fails: no memory")
    with pytest.raises(RuntimeError, match="fp8_mqa_logits: no configuration of class 'heads 64, dim 128' is correct"):
        tune.tune(OP)


def test_compiling_a_candidate_gives_its_registers_or_the_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("DSA_CACHE_DIR", str(tmp_path))
    registers = tune._compile(indexer_cache_sm90.compile_indexer_cache, (32, "int32", True))
    assert 10 < int(registers) <= 32 and list(tmp_path.glob("*.o"))
    failure = tune._compile(indexer_cache_sm90.compile_indexer_cache, (32, "int8", True))
    assert failure == "fails: 'int8'"
