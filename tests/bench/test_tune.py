"""The search of tile configurations, without a GPU."""

import dataclasses
import json
import pickle
from functools import partial

import pytest
import torch

from dsa.cute import tuning
from dsa.kernels.cache import indexer_cache_sm90
from dsa.kernels.gemm import fp8_gemm_choice, fp8_gemm_config, fp8_gemm_few_rows_config
from dsa.kernels.indexer.fp8_mqa_logits_sm90 import MqaLogitsConfig
from dsa.kernels.indexer.fp8_paged_mqa_logits_sm90 import PagedMqaLogitsConfig
from dsa.ops.gemm import fp8_gemm_nt as fp8_gemm_nt_op
from dsa.runtime import backends
from dsa.runtime.op import OPS
from dsa_bench.gemm import _published_layers
from dsa_bench.harness import case, tune
from dsa_bench.harness.benchmarks import tunable

OP, CLASS = "fp8_mqa_logits", "heads 8, dim 128"
ONE_OF_EACH = fp8_gemm_few_rows_config.CONFIGS[0], fp8_gemm_config.ONE_MATRIX_CONFIGS[0]


@pytest.mark.parametrize(
    ("op", "config_type", "classes"),
    [
        (OP, MqaLogitsConfig, {f"heads {h}, dim {d}": h for h in (8, 16, 32, 64) for d in (32, 64, 128)}),
        (
            "fp8_paged_mqa_logits",
            PagedMqaLogitsConfig,
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
    # The compile function must pickle, because the tuner compiles in other processes.
    for config in ONE_OF_EACH:
        compile_function = pickle.loads(pickle.dumps(plan.candidates[config]))
        assert int(tune._compile(compile_function, ("bfloat16", config))) > 32


@pytest.mark.parametrize(
    ("modelled", "winner"), [("fast", None), ("near", None), ("slow", "fast"), ("another", "fast"), (None, "fast")]
)
def test_a_winner_is_written_where_the_modelled_choice_is_slower(modelled, winner):
    trials = [tune.Trial(config, "96", (ms, 1.0)) for config, ms in (("fast", 1.0), ("near", 1.02), ("slow", 1.1))]
    assert tune._winner(tune.TuningClass(lambda config: True, {}, modelled), trials) == winner


def test_data_is_of_one_gpu_and_of_classes_with_a_winner(tmp_path):
    path = tmp_path / "op.json"
    first, second = (MqaLogitsConfig(128, stages, 2) for stages in (3, 4))
    tuning.write("op", {"a": first, "b": second, "c": None}, {"device": "a GPU", "multiprocessors": 132}, path)
    tuning.write("op", {"a": None, "d": first}, {"device": "another GPU", "multiprocessors": 132}, path)
    data = json.loads(path.read_text())
    assert data["device"] == "another GPU"
    assert data["winners"] == {"b": dataclasses.asdict(second), "d": dataclasses.asdict(first)}
    tuning.write("op", {"e": first}, {"device": "a smaller GPU", "multiprocessors": 114}, path)
    assert json.loads(path.read_text())["winners"].keys() == {"e"}


@pytest.mark.parametrize("config", ONE_OF_EACH)
def test_an_op_forgets_its_choice_for_a_trial(config):
    choose = partial(fp8_gemm_nt_op._choose_config, 64, 7168, 16384, 132)
    chosen = choose()
    call = tune._under("fp8_gemm_nt", "sm_90", "64 x 7168 x 16384", config, choose)
    assert call() == config != chosen and choose() == chosen


class Gpu:
    """Replaces the tuner's GPU. Fewer stages are faster, and with equal stages fewer groups. Two stages give wrong
    results."""

    def __init__(self, monkeypatch, folder, arch):
        self.arch, self.checked, self.timed = arch, [], []
        self.path = folder / arch / f"{OP}.json"
        self.path.parent.mkdir()
        monkeypatch.setattr(tuning, "TUNED", folder)
        monkeypatch.setattr(tune, "bench", self.bench)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(backends, "arch_of", lambda device: self.arch)
        monkeypatch.setattr(backends, "num_sms", lambda device: 78)
        monkeypatch.setattr(case.load(OP), "case", self.case)
        monkeypatch.setattr(OPS[OP], "launches", {arch: OPS[OP].launches["sm_90"]})
        monkeypatch.setattr(tune, "_compile", compile_nothing)

    def winners(self):
        return json.loads(self.path.read_text())["winners"]

    def call(self):
        self.called = tuning.tuned(MqaLogitsConfig, OP, self.arch, CLASS)
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


@pytest.fixture
def gpu(monkeypatch, tmp_path, request, in_threads):
    return Gpu(monkeypatch, tmp_path, getattr(request, "param", "sm_90"))


def compile_nothing(compile_function, arguments):
    config = arguments[-1]
    return "fails: spilled" if config.columns == 256 else "96"


@pytest.mark.parametrize("gpu", ["sm_90", "sm_100"], indirect=True)
def test_the_tuner_keeps_the_fastest_that_is_correct(gpu, monkeypatch, capsys):
    plan = case.load(OP).tuning()
    plan = dataclasses.replace(plan, classes={CLASS: plan.classes[CLASS]})
    monkeypatch.setattr(case.load(OP), "tuning", lambda: plan)
    gpu.path.write_text(json.dumps({"winners": {CLASS: {"columns": 1}, "another": {"columns": 2}}}))
    tune.tune(OP)
    data = json.loads(gpu.path.read_text())
    assert data["winners"] == {CLASS: {"columns": 128, "stages": 3, "groups": 2}, "another": {"columns": 2}}
    assert data["op"] == OP and data["device"] == "a GPU" and data["multiprocessors"] == 78
    shown = capsys.readouterr().out
    assert "columns 128 stages 3   groups 2      96 registers     3.2000  3.20" in shown
    assert "wrong: calc_diff 1" in shown and "fails: spilled" in shown
    assert len(gpu.timed) > 1 and all(config.stages != 2 and config.columns == 128 for config in gpu.timed)
    assert gpu.checked.count(False) == 1 and gpu.checked.count(True) > 1


def first_trial(op, arch, name, registers, cases):
    return [tune.Trial(next(iter(registers)), "96", (1.0,))]


@pytest.mark.parametrize("gpu", ["sm_100"], indirect=True)
def test_the_tuner_writes_an_archs_first_data(gpu, monkeypatch):
    monkeypatch.setattr(tune, "_try_all", first_trial)
    tune.tune(OP)
    assert gpu.winners().keys() == {f"heads {heads}, dim {dim}" for heads in (8, 16, 32, 64) for dim in (32, 64, 128)}


def test_a_search_keeps_what_it_found_before_an_error(gpu, monkeypatch):
    names = []

    def one_then_none(op, arch, name, *rest):
        names.append(name)
        if len(names) > 1:
            raise torch.OutOfMemoryError("no memory")
        return first_trial(op, arch, name, *rest)

    monkeypatch.setattr(tune, "_try_all", one_then_none)
    with pytest.raises(torch.OutOfMemoryError):
        tune.tune(OP)
    assert [*gpu.winners()] == names[:1]


def test_the_tuner_needs_a_kernel_for_the_gpu(gpu):
    gpu.arch = "sm_100"
    with pytest.raises(ValueError, match="fp8_mqa_logits: has no sm_100 kernel, only those for sm_90"):
        tune.tune(OP)


def test_the_tuner_reports_a_class_without_a_correct_configuration(gpu, monkeypatch):
    monkeypatch.setattr(tune, "_compile", lambda function, arguments: "fails: no memory")
    with pytest.raises(RuntimeError, match="fp8_mqa_logits: no configuration of class 'heads 64, dim 128' is correct"):
        tune.tune(OP)


def test_of_several_shapes_a_failure_or_the_most_registers_counts():
    assert max(["96", "128", "-"], key=tune._worse) == "128"
    assert max(["fails: no", "128"], key=tune._worse) == "fails: no"


def test_compiling_a_candidate_gives_its_registers_or_the_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("DSA_CACHE_DIR", str(tmp_path))
    registers = tune._compile(indexer_cache_sm90.compile_indexer_cache, (32, "int32", True))
    assert 10 < int(registers) <= 32 and list(tmp_path.glob("*.o"))
    failure = tune._compile(indexer_cache_sm90.compile_indexer_cache, (32, "int8", True))
    assert failure == "fails: 'int8'"
