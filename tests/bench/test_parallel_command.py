"""The benchmark of several GPUs as a command and as a library, its table, its picture and its document."""

import json
import subprocess
import sys

import pytest

from dsa_bench.e2e import parallel, plot, table
from dsa_bench.e2e.computed import computed
from dsa_bench.e2e.parallel_rows import shape
from tests.bench import parallel_command

ROW = {"shape": "V4-Flash decode 1 x 8192, 2 GPUs", "model": "V4-Flash", "run": "decode 1 x 8192", "gpus": 2}
ROW |= {"layers": 43, "published_layers": 43, "tokens": 1, "ms": 8.0, "tokens/s": 125.0, "figure": "125 tokens/s"}
ROW |= {"memory": 80e9, "collectives": 0.125, "shard_ms": 7.0, "efficiency": 0.875}
ROW |= {"few_layers": 5, "few_ms": 1.0, "one_gpu_ms": 1.1, "speedup": 1.1}
ONCE = (
    ROW
    | {"run": "prefill 1048576", "layers": 30}
    | dict.fromkeys(("collectives", "shard_ms", "efficiency", "few_layers", "few_ms", "one_gpu_ms", "speedup"))
)
ROWS = [ROW, ONCE, ROW | {"model": "V3.2", "layers": 20, "published_layers": 61}]


@pytest.mark.slow
def test_the_command_prints_rows_and_a_table():
    """Its processes compute the rows, and it prints their progress."""
    call = [*parallel_command.COMMAND, "--models", "GLM-5", "--runs", "prefill 40", "--layers", "3"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    row, head, line = done.stdout.splitlines()
    assert json.loads(row)["shape"] == shape("GLM-5", "prefill 40", 2) and json.loads(row)["layers"] == 3
    assert [head, line] == [table.parallel_head(), table.parallel_line(json.loads(row))]
    assert " s  compiled" in done.stderr and "GLM-5, 3 layers on 2: drawn" in done.stderr


@pytest.mark.parametrize(("there", "expected"), [(1, [8]), (2, [2, 8]), (3, [2, 8]), (4, [2, 8, 4])])
def test_all_rows(there, expected, monkeypatch):
    """Of two GPUs, of one of eight, and of four, where there are as many; what is done is left out everywhere."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: there)
    monkeypatch.setattr(parallel, "rows", lambda gpus, done: iter([(gpus, done)]))
    monkeypatch.setattr(parallel.one_of_many, "rows", lambda done: iter([(8, done)]))
    assert list(parallel.all_rows(["a"])) == [(gpus, ["a"]) for gpus in expected]


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


def test_processes_end_when_nobody_wants_the_rest(monkeypatch):
    script = "import time; print('{}', flush=True); time.sleep(600)"
    monkeypatch.setattr(parallel, "COMMAND", (sys.executable, "-c", script))
    rows = parallel.rows()
    assert next(rows) == {}
    rows.close()


def test_more_gpus_than_there_are(capsys, monkeypatch):
    monkeypatch.setattr("dsa.runtime.backends.why_no_kernels", lambda: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(SystemExit):
        parallel.main(["--gpus", "4"])
    assert "--gpus: must be at most the 2 that torch sees, got 4" in capsys.readouterr().err


def test_lines():
    assert table.parallel_line(ROW).split()[:4] == ["V4-Flash", "43", "of", "43"]
    assert table.parallel_line(ROW).endswith("12.5%        0.88      1.10")
    assert table.parallel_line(ONCE).endswith("80.0") and "30 of 43" in table.parallel_line(ONCE)
    assert len(table.parallel_head()) == len(table.parallel_line(ROW))


SILENT = {"shape": "V3.2 decode 1 x 8192, one of 8 GPUs", "model": "V3.2", "run": "decode 1 x 8192", "gpus": 8}
SILENT |= {"layers": 30, "published_layers": 61, "tokens": 1, "shard_ms": 3.0, "memory": 50e9, "ms": 3.0}
FOUR = ROW | {"model": "V3.2", "gpus": 4, "layers": 20, "published_layers": 61, "ms": 4.0, "shard_ms": 3.4}


def test_more_gpus_than_there_are_are_computed():
    """61 layers of a part's 3 ms of 30, and of what 20 layers on four GPUs say: 0.6 ms of a sequence, which is said in
    any case, and 0.9 ms of eight, whose other rows come from 7 GPUs in place of 3."""
    two, eight = FOUR | {"gpus": 2, "ms": 9.0}, {"run": "decode 8 x 8192", "tokens": 8}
    expected = 61 * (3.0 / 30 + 0.6 / 20)
    assert computed(SILENT, [two, FOUR, ROW, ONCE]) == pytest.approx(expected)
    steps = [two, FOUR, FOUR | eight | {"ms": 4.3}]
    assert computed(SILENT | eight, steps) == pytest.approx(61 * (0.1 + (0.6 + 0.3 * 7 / 3) / 20))
    # More sequences that say less than one say that.
    assert computed(SILENT | eight, [FOUR, FOUR | eight | {"ms": 3.6}]) == pytest.approx(61 * (0.1 + 0.2 / 20))
    assert computed(SILENT, [two]) == pytest.approx(61 * (0.1 + 5.6 / 20))
    assert computed(SILENT, []) is None and computed(SILENT | eight, [FOUR, ONCE | {"model": "V3.2"}]) is None
    prompt = {"run": "prefill 4096", "tokens": 4096}
    assert computed(SILENT | prompt, [FOUR | prompt]) == pytest.approx(61 * (0.1 + 0.03 * (7 / 8) / (3 / 4)))


def test_the_picture_needs_comparisons_alone(tmp_path):
    plot.write_parallel([ROW, ONCE, ROW | {"model": "V3.2"}], tmp_path / "rows.png")
    assert (tmp_path / "rows.png").stat().st_size > 1000
