"""`dsa bench` and `dsa tune`, run in this process."""

import re

import pytest

from dsa.runtime import backends
from dsa_bench.gemm import per_token_cast_to_fp8 as benchmark
from dsa_bench.harness import case
from dsa_bench.harness.benchmarks import benchmarks
from dsa_layers.command.main import main


@pytest.fixture
def error(capsys):
    """Return the one line of a wrong call, which has no standard output."""

    def line():
        captured = capsys.readouterr()
        assert captured.out == ""
        (only,) = captured.err.splitlines()
        return only

    return line


@pytest.mark.parametrize("name", ["nonsense", "harness", ""])
def test_bench_names_what_it_can_run(name, error):
    assert main(["bench", name]) == 2
    expected = f"dsa bench: op: must be e2e, host or one of {', '.join(benchmarks())}, got '{name}'"
    assert error() == expected and "per_token_cast_to_fp8" in benchmarks()


@pytest.mark.parametrize(("command", "what"), [("bench", "a benchmark"), ("tune", "tuning")])
def test_bench_and_tune_need_a_gpu(command, what, monkeypatch, error):
    monkeypatch.setattr(backends, "why_no_kernels", lambda: "torch sees no CUDA GPU")
    assert main([command, "fp8_gemm_nt"]) == 2
    assert error() == f"dsa {command}: {what} needs a GPU with kernels: torch sees no CUDA GPU"


@pytest.mark.parametrize("name", ["nonsense", "indexer_cache", "e2e"])
def test_tune_needs_an_op_with_configurations(name, monkeypatch, error):
    """Also where there is no GPU."""
    monkeypatch.setattr(backends, "why_no_kernels", None)  # not even asked for
    assert main(["tune", name]) == 2
    ops = "fp8_gemm_nt, fp8_mqa_logits, fp8_paged_mqa_logits"
    assert error() == f"dsa tune: op: must be one of {ops}, whose kernels have configurations, got '{name}'"


@pytest.mark.parametrize(
    ("command", "option"), [("bench rotary", "--csv"), ("bench e2e", "--png"), ("tune fp8_gemm_nt", "--output")]
)
def test_paths_that_no_file_can_have_are_refused_before_any_work(tmp_path, monkeypatch, error, command, option):
    monkeypatch.setattr(backends, "why_no_kernels", None)  # not even asked for
    for path, problem in [
        (tmp_path, f"must be a file, got the directory {tmp_path}"),
        (tmp_path / "nowhere" / "x", f"there is no directory {tmp_path / 'nowhere'}"),
    ]:
        assert main([*command.split(), option, str(path)]) == 2
        assert error() == f"dsa {command.split()[0]}: {option}: {problem}"


def test_a_profile_writes_no_files(tmp_path, error):
    assert main(["bench", "rotary", "--profile", "--csv", str(tmp_path / "x")]) == 2
    assert error() == "dsa bench: --profile: prints where the time goes; it writes no --csv and no --png"


def test_bench_prints_a_table_and_writes_and_draws_it(monkeypatch, tmp_path, capsys):
    times = iter([{"dsa": 0.5, "vllm": 0.75, "sglang": 1.0}, {"dsa": 0.25}])
    monkeypatch.setattr(backends, "why_no_kernels", lambda: None)
    monkeypatch.setattr(case, "bench", lambda calls, **options: next(times))
    monkeypatch.setattr(benchmark, "SHAPES", [(8,), (9,)])
    monkeypatch.setattr(benchmark, "case", lambda n: case.Case(f"{n} x 128", {}, lambda ms: f"{1 / ms:.0f} GB/s"))
    files = ["--csv", str(tmp_path / "rows.csv"), "--png", str(tmp_path / "rows.png")]
    assert main(["bench", "per_token_cast_to_fp8", *files]) == 0
    shown = capsys.readouterr().out
    assert re.search(
        r"8 x 128 +0\.5000 ms +2 GB/s +vllm 0\.7500 ms, ratio 1\.50; sglang 1\.0000 ms, ratio 2\.00", shown
    )
    assert re.search(r"9 x 128 +0\.2500 ms +4 GB/s +no peer", shown)
    header, *written = (tmp_path / "rows.csv").read_text().splitlines()
    assert header == "shape,ms,figure,vllm ms,vllm ratio,sglang ms,sglang ratio"
    assert written == ["8 x 128,0.5,2 GB/s,0.75,1.5,1.0,2.0", "9 x 128,0.25,4 GB/s,,,,"]
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
