"""The benchmark of several GPUs as a command and as a library."""

import json
import subprocess
import sys

import pytest

from dsa_bench.e2e import parallel, table
from dsa_bench.e2e.parallel_rows import shape
from tests.bench import parallel_command


@pytest.mark.slow
def test_the_command_prints_rows_and_a_table():
    call = [*parallel_command.COMMAND, "--models", "GLM-5", "--runs", "prefill 40", "--layers", "3"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    row, head, line = done.stdout.splitlines()
    assert json.loads(row)["shape"] == shape("GLM-5", "prefill 40", 2) and json.loads(row)["layers"] == 3
    assert [head, line] == [table.parallel_head(), table.parallel_line(json.loads(row))]
    assert " s  compiled" in done.stderr and "GLM-5, 3 layers on 2: made" in done.stderr


@pytest.mark.parametrize(("gpus", "expected"), [(1, [8]), (2, [2, 8]), (3, [2, 8]), (4, [2, 8, 4])])
def test_all_rows_are_those_that_the_machine_can_compute(gpus, expected, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr(parallel, "rows", lambda count, done: iter([(count, done)]))
    monkeypatch.setattr(parallel.one_of_many, "rows", lambda done: iter([(8, done)]))
    assert list(parallel.all_rows(["a"])) == [(count, ["a"]) for count in expected]


@pytest.mark.parametrize("code", [0, 3])
def test_rows_are_the_lines_of_processes_which_may_fail_after_some(code, monkeypatch):
    script = "import json, sys; print('A line.'); print(json.dumps({'asked': sys.argv[1:]}), flush=True); "
    monkeypatch.setattr(parallel, "COMMAND", (sys.executable, "-c", script + f"sys.exit({code})"))
    rows = parallel.rows(done=["a", "b"])
    assert next(rows) == {"asked": ["--gpus", "2", "--done", "a", "--done", "b"]}
    if code:
        with pytest.raises(RuntimeError, match="--gpus 2 --done a --done b ended with 3"):
            next(rows)
    assert next(rows, None) is None


def test_processes_end_when_the_caller_stops_before_the_last_row(monkeypatch):
    script = "import time; print('{}', flush=True); time.sleep(600)"
    monkeypatch.setattr(parallel, "COMMAND", (sys.executable, "-c", script))
    rows = parallel.rows()
    assert next(rows) == {}
    rows.close()
