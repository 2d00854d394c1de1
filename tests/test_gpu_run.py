"""tests/gpu/run.py records what passed, continues an interrupted run, chooses the DSL of each entry, and leaves out
entries that need more GPUs."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.gpu import run

MODULE = "tests/gpu/elementwise/test_rms_norm.py"
TESTS = [f"{MODULE}::test_one", f"{MODULE}::TestMore::test_two"]


def told(command):
    report, listed = (
        next(w for w in command if w.startswith(sign)).removeprefix(sign) for sign in ("--junitxml=", "@")
    )
    return Path(report), Path(listed).read_text().splitlines()


def reported(test, inside=""):
    place, _, name = test.replace(".py", "").replace("/", ".").replace("::", ".").rpartition(".")
    return f'<testcase classname="{place}" name="{name}">{inside}</testcase>'


def outcome(monkeypatch, cases, returncode):
    """Return the outcome of the entry rms_norm, whose two tests run in two simulated pytest processes. cases: for each
    process, the XML inside its <testcase>, or None if it writes no report."""
    monkeypatch.setattr(run, "_collected", lambda arguments: TESTS)

    def pytest_process(command, **options):
        report, own = told(command)
        inside = cases[TESTS.index(own[0])]
        if inside is not None:
            report.write_text(f"<testsuites>{''.join(reported(test, inside) for test in own)}</testsuites>")
        return subprocess.CompletedProcess(command, returncode, "", "")

    monkeypatch.setattr(run.subprocess, "run", pytest_process)
    return run.run_tests(["rms_norm"])["rms_norm"]


def test_a_run_that_passes(monkeypatch):
    found = outcome(monkeypatch, ['<properties><property name="error" value="0.5"/></properties>', ""], 0)
    assert (found.tests, found.skipped, found.failed, found.worst) == (2, 0, [], 0.5)


def test_a_failed_test(monkeypatch):
    assert outcome(monkeypatch, ["", "<failure/>"], 1).failed == ["test_two"]
    assert outcome(monkeypatch, ["<error/>", ""], 1).failed == ["test_one"]


@pytest.mark.parametrize("alone", ["", "<failure/>", None])
def test_a_test_that_found_no_memory_runs_again_by_itself(alone, monkeypatch):
    """alone: the XML inside the test's <testcase> in the second run. None: the second process ends without a report,
    and the test counts as not run."""
    monkeypatch.setattr(run, "_collected", lambda arguments: TESTS)
    processes = []

    def pytest_process(command, **options):
        report, own = told(command)
        processes.append(own)
        inside = "<failure>torch.OutOfMemoryError: CUDA out of memory</failure>" if TESTS[1] in own else ""
        if processes.count(own) == 2:
            inside = alone
        if inside is not None:
            report.write_text(f"<testsuites>{''.join(reported(test, inside) for test in own)}</testsuites>")
        return subprocess.CompletedProcess(command, int(bool(inside)) if inside is not None else -9, "", "")

    monkeypatch.setattr(run.subprocess, "run", pytest_process)
    found = run.run_tests(["rms_norm"])["rms_norm"]
    assert sorted(processes) == sorted([TESTS[:1], TESTS[1:], TESTS[1:]])
    expected = {"": [], "<failure/>": ["test_two"], None: ["pytest ended with -9", "1 tests did not run"]}
    assert found.failed == expected[alone] and found.tests == (1 if alone is None else 2)


def test_a_process_that_ends_early_leaves_the_others_results(monkeypatch):
    found = outcome(monkeypatch, ["", None], -11)
    assert found.tests == 1
    assert "pytest ended with -11" in found.failed and "1 tests did not run" in found.failed


def test_a_process_that_ends_badly_after_its_report(monkeypatch):
    found = outcome(monkeypatch, ["", ""], 3)
    assert found.tests == 2 and set(found.failed) == {"pytest ended with 3"}


def test_skipped_tests_alone_are_no_evidence(monkeypatch):
    found = outcome(monkeypatch, ["<skipped/>", "<skipped/>"], 0)
    assert found.skipped == 2 and found.failed == ["all of its 2 tests were skipped"]
    assert outcome(monkeypatch, ["<skipped/>", ""], 0).failed == []


def test_a_benchmark_that_raises_fails_its_entry_alone(monkeypatch):
    def broken(name, done):
        raise RuntimeError("no such peer")

    monkeypatch.setattr(run, "rows_of", broken)
    entry = run.run_entry("rms_norm", run.Outcome(tests=3), bench=True)
    assert (entry["tests"], entry["failed"], entry["bench"]) == (3, 1, [])


def test_no_benchmark_behind_a_failed_test(monkeypatch):
    monkeypatch.setattr(run, "rows_of", lambda name, done: pytest.fail("is not to run"))
    outcome = run.Outcome(tests=3, failed=["test_one"])
    assert run.run_entry("rms_norm", outcome, bench=True)["failed"] == 1


HEAD = {"device": "1 x a GPU", "torch": "2", "dsl": "4", "peers": {"vllm": "0.33.0"}, "kernels": "k", "launches": "l"}


def test_a_run_that_is_cut_off_is_gone_on_with(monkeypatch, tmp_path):
    """With --continue, passed tests do not run again, and recorded rows are not measured again. This requires equal
    digests, devices and versions."""
    monkeypatch.setattr(run.receipt, "PATH", tmp_path / "receipt.json")
    run.receipt.save({})
    outcome = run.Outcome(tests=3, skipped=1, worst=0.5)

    def cut_off(name, done):
        yield {"shape": "a"}
        yield {"shape": "b"}
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "rows_of", cut_off)
    pending = HEAD | run._pending(outcome, [])
    with pytest.raises(KeyboardInterrupt):
        run.run_entry("e2e", outcome, bench=True, keep=run._keeper("sm_90", "e2e", pending))
    entry = run.receipt.load()["sm_90"]["e2e"]
    assert entry["unverified"] == run.BEGUN and [row["shape"] for row in entry["bench"]] == ["a", "b"]

    assert run.begun(entry, HEAD | {"commit": "1" * 12, "date": "2026-11-29"}) == outcome
    changes = [{"kernels": "others"}, {"launches": "others"}, {"unverified": None}, {"device": "2 x a GPU"}]
    changes.append({"peers": {"vllm": "0.34.0"}})
    assert not any(run.begun(entry | change, HEAD) for change in changes) and run.begun({}, HEAD) is None

    monkeypatch.setattr(run, "rows_of", lambda name, done: iter([{"shape": f"after {len(done)}"}]))
    entry = run.run_entry("e2e", outcome, bench=True, done=entry["bench"])
    assert [row["shape"] for row in entry["bench"]] == ["a", "b", "after 2"] and entry["unverified"] is None


def test_what_the_environment_must_not_choose(monkeypatch, capsys):
    monkeypatch.setattr("dsa.runtime.backends.why_no_kernels", lambda: None)
    for name in run.UNSET:
        monkeypatch.setenv(name, "reference")
    with pytest.raises(SystemExit):
        run.main(["--commit", "5c525c2"])
    assert "--commit: must be" in capsys.readouterr().err
    assert not set(run.UNSET) & set(run.os.environ)


def test_every_kernel_of_an_entry_is_compiled_first(monkeypatch):
    compiled = []

    class InThisProcess:
        def __init__(self, mp_context):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def submit(self, function, *arguments):
            compiled.append(arguments[0].__name__)
            future = run.concurrent.futures.Future()
            future.set_result(None)
            return future

    monkeypatch.setattr(run.concurrent.futures, "ProcessPoolExecutor", InThisProcess)
    run.compile_all(["rms_norm", "kv_cache", "fuzz"], "sm_90")
    kernels = {"compile_rms_norm", "compile_rms_norm_gradient", "compile_rms_norm_rotary", "compile_rms_norm_cast"}
    kernels |= {"compile_write_kv_cache", "compile_read_kv_cache", "compile_write_mla_cache"}
    assert set(compiled) == kernels


@pytest.mark.parametrize("name", run.receipt.ROW_BY_ROW)
def test_entries_of_whole_passes_go_on_behind_their_rows(name, monkeypatch):
    given = []
    functions = {"e2e": "report.rows", "million": "million.rows", "parallel": "parallel.all_rows"}
    functions["drafts"] = "drafts.rows"
    engines = run.receipt.ENGINES
    monkeypatch.setattr(run, "engine_rows", lambda engine, done: given.append((engine, done)) or iter([{}]))
    monkeypatch.setattr("dsa_bench.e2e.command.compile_ahead", lambda asked, tell: None)
    for f in functions.values():
        monkeypatch.setattr(f"dsa_bench.e2e.{f}", lambda done, f=f, **tell: given.append((f, done)) or iter([{}]))
    assert list(run.rows_of(name, [{"shape": "a"}, {"shape": "b"}])) == [{}]
    assert given == [(functions.get(name) or engines[name], ["a", "b"])]


def test_what_needs_two_gpus_runs_with_its_mark_and_by_itself():
    groups = [(marks, names) for marks, *_, names in run._groups(["rms_norm", "parallel", "several_gpus", "e2e"])]
    assert groups == [
        ("not several_gpus", ["rms_norm", "e2e"]),
        ("several_gpus", ["parallel"]),
        ("several_gpus", ["several_gpus"]),
    ]


class StoppedHere(Exception):
    pass


def test_the_oldest_dsls_entry_is_gone_on_with(monkeypatch, tmp_path):
    """The entry is recorded with the version of the oldest DSL. So --continue finds equal versions and does not run the
    tests again."""
    monkeypatch.setattr(run.receipt, "PATH", tmp_path / "receipt.json")
    monkeypatch.setattr("dsa.runtime.backends.why_no_kernels", lambda: None)
    monkeypatch.setattr("dsa.runtime.backends.arch_of", lambda device: "sm_90")
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    monkeypatch.setattr(run, "dsl_version", lambda environment: run.receipt.OLDEST_DSL)
    monkeypatch.setattr(run, "compile_all", lambda names, arch: None)
    monkeypatch.setattr(run, "run_tests", lambda names: {name: run.Outcome(tests=3) for name in names})
    arguments = ["oldest_dsl", "--commit", "0" * 12]

    def cut_off(*_, **__):
        raise StoppedHere

    with monkeypatch.context() as cut, pytest.raises(StoppedHere):
        cut.setattr(run, "run_entry", cut_off)
        run.main(arguments)
    monkeypatch.setattr(run, "run_tests", lambda names: pytest.fail("have passed"))
    assert run.main([*arguments, "--continue"]) == 0
    entry = run.receipt.load()["sm_90"]["oldest_dsl"]
    assert (entry["tests"], entry["dsl"], entry["unverified"]) == (3, run.receipt.OLDEST_DSL, None)


def test_the_peers_whose_versions_are_on_record_are_those_that_are_installed():
    (line,) = re.findall(
        r"^pip install --no-deps ((?:.*\\\n)*.*)$", (run.receipt.ROOT / "docs/reference/peers.md").read_text(), re.M
    )
    assert sorted(re.findall(r"([\w-]+)==", line)) == [*run.PEERS]


@pytest.mark.parametrize("gpus", [1, 2])
def test_without_entries_one_gpu_leaves_out_what_needs_two(gpus, monkeypatch):
    asked = []

    def compile_all(names, arch):
        asked.extend(names)
        raise StoppedHere

    monkeypatch.setattr("dsa.runtime.backends.why_no_kernels", lambda: None)
    monkeypatch.setattr("dsa.runtime.backends.arch_of", lambda device: "sm_90")
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setitem(run.receipt.ENGINES, "vllm_engine", "no_such_package")
    for name in ("DSA_OLDEST_DSL", run.TRAINED_MODEL):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(run, "compile_all", compile_all)
    with pytest.raises(StoppedHere):
        run.main(["--commit", "0" * 12])
    assert {*run.receipt.asked("sm_90")} - {*asked} == {"accuracy", "oldest_dsl", *run.receipt.ENGINES} | (
        {"parallel", "several_gpus"} if gpus == 1 else set()
    )


def dsl(folder, version):
    package = folder / "nvidia_cutlass_dsl" / "dsl_packages" / "cutlass"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f'__version__ = "{version}"\n')
    return str(folder)


def test_the_oldest_dsl_is_found_first(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", dsl(tmp_path / "usual", "4.8.9"))
    monkeypatch.delenv("DSA_OLDEST_DSL", raising=False)
    assert run.oldest_dsl() == {}
    monkeypatch.setenv("DSA_OLDEST_DSL", dsl(tmp_path / "oldest", "4.8.0"))
    groups = run._groups(["rms_norm", "oldest_dsl"])
    versions = {name: run.dsl_version(environment) for *_, environment, names in groups for name in names}
    assert versions == {"rms_norm": "4.8.9", "oldest_dsl": "4.8.0"}


def test_another_dsl_is_refused_in_the_oldest_ones_place(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("dsa.runtime.backends.why_no_kernels", lambda: None)
    monkeypatch.setattr("dsa.runtime.backends.arch_of", lambda device: "sm_90")
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setenv("DSA_OLDEST_DSL", dsl(tmp_path, "4.9.9"))
    with pytest.raises(SystemExit):
        run.main(["oldest_dsl", "--commit", "0" * 12])
    assert "DSA_OLDEST_DSL must name a folder with CuTe DSL 4.8.0, got 4.9.9" in capsys.readouterr().err
