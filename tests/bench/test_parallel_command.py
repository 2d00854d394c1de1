"""The processes that the benchmark of several GPUs starts, and the rows that it reads from them."""

import sys

import pytest

from dsa_bench.e2e import parallel
from dsa_bench.e2e.parallel import shape
from tests.bench import parallel_command


@pytest.fixture
def gpus(monkeypatch):
    def found(count):
        monkeypatch.setattr("torch.cuda.device_count", lambda: count)

    found(2)
    return found


@pytest.mark.slow
def test_rows_are_computed_by_ranks(gpus, monkeypatch, capfd):
    monkeypatch.setattr(parallel, "COMMAND", parallel_command.COMMAND)
    (row,) = parallel.rows(models=["GLM-5"], runs=["prefill 40"], layers=3)
    assert row["shape"] == shape("GLM-5", "prefill 40", 2) and row["layers"] == 3
    assert "GLM-5, 3 layers on 2: made" in capfd.readouterr().err


@pytest.mark.parametrize(("count", "expected"), [(1, [8]), (2, [2, 8]), (3, [2, 8]), (4, [2, 8, 4])])
def test_all_rows_are_those_that_the_machine_can_compute(count, expected, gpus, monkeypatch):
    gpus(count)
    monkeypatch.setattr(parallel, "compiled_rows", lambda name, **options: iter([(name, options)]))
    one = {8: {"one": True}}
    choices = [{"gpus": n, "done": ["a"]} | one.get(n, {}) for n in expected]
    assert list(parallel.all_rows(["a"])) == [("parallel", choice) for choice in choices]


@pytest.mark.parametrize("code", [0, 3])
def test_rows_are_the_lines_of_processes_which_may_fail_after_some(code, gpus, monkeypatch):
    script = "import sys; print('A line.'); print(sys.argv[1], flush=True); "
    monkeypatch.setattr(parallel, "COMMAND", (sys.executable, "-c", script + f"sys.exit({code})"))
    rows = parallel.rows(models=["V3.2"], done=["a", "b"])
    assert next(rows) == {"gpus": 2, "models": ["V3.2"], "runs": None, "layers": None, "done": ["a", "b"]}
    if code:
        with pytest.raises(RuntimeError, match=r'"done": \["a", "b"\], .* ended with 3'):
            next(rows)
    assert next(rows, None) is None


def test_processes_end_when_the_caller_stops_before_the_last_row(gpus, monkeypatch):
    script = "import time; print('{}', flush=True); time.sleep(600)"
    monkeypatch.setattr(parallel, "COMMAND", (sys.executable, "-c", script))
    rows = parallel.rows()
    assert next(rows) == {}
    rows.close()
