"""`dsa generate --gpus N` on a CPU: processes of its own, one terminal, one message."""

import contextlib
import io
import json
import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsa_layers.command.main import main
from tests.default_signals import reset_signals
from tests.layers.io.stand_ins import changed

COMMAND = [sys.executable, "-m", "dsa_layers", "generate"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
SECONDS = 300  # for what takes few


def arguments(checkpoint, options):
    device = [] if "--device" in options else ["--device", "cpu"]
    return [str(checkpoint), *device, "--dtype", "float32", "--max-tokens", "8", *options]


def generate(checkpoint, *options, stdin="", start=COMMAND, **environment):
    call = [*start, *arguments(checkpoint, options)]
    done = subprocess.run(
        call, input=stdin.encode(), capture_output=True, env=ENVIRONMENT | environment, timeout=SECONDS
    )
    # text=True would replace a carriage return, which a model may write.
    return SimpleNamespace(returncode=done.returncode, stdout=done.stdout.decode(), stderr=done.stderr.decode())


@pytest.fixture
def generate_here(capfd, monkeypatch):
    """`generate` with this process as the one that starts the ranks, or that is alone: torch is there, the import of
    which takes a new process seconds. The ranks are processes of their own."""

    def late(*_):
        raise RuntimeError(f"has not ended within {SECONDS} s")

    def call(checkpoint, *options, **environment):
        for name, value in ({"OMP_NUM_THREADS": "1"} | environment).items():
            monkeypatch.setenv(name, value)
        signal.signal(signal.SIGALRM, late)
        signal.alarm(SECONDS)
        try:
            code = main(["generate", *arguments(checkpoint, options)])
        finally:
            signal.alarm(0)
        written = capfd.readouterr()
        return SimpleNamespace(returncode=code, stdout=written.out, stderr=written.err)

    return call


def test_greedy_text_is_that_of_one_process(checkpoint, generate_here, monkeypatch):
    prompts = ["--prompt", "-", "--prompt", "def f(", "--temperature", "0"]
    two = generate(checkpoint, *prompts, "--gpus", "2", stdin="hello world")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello world")))
    one = generate_here(checkpoint, *prompts, "--gpus", "1")
    assert one.returncode == two.returncode == 0, two.stderr
    assert one.stdout == two.stdout and one.stdout.startswith("[0] hello world")
    (line,) = two.stderr.splitlines()
    assert line.startswith("prefill: ")


@pytest.mark.slow
def test_torchrun_starts_ranks_too(checkpoint, generate_here):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *COMMAND[1:]]
    options = ["--prompt", "def f(", "--temperature", "0"]
    done, one = generate(checkpoint, *options, start=torchrun), generate_here(checkpoint, *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout == one.stdout
    as_its_rank = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    wrong = generate_here(checkpoint, *options, "--gpus", "3", **as_its_rank)
    assert wrong.returncode == 2 and "--gpus: must be the 2 ranks that were started, got 3" in wrong.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpus", "3"], "--gpus: 3 do not evenly share the 2048 tokens of model.embed_tokens"),
        (["--gpus", "0"], "--gpus"),
        (["--gpus", "2", "--device", "cuda:1"], "--device: must be cpu or cuda, of which each rank takes its own GPU"),
        (["--gpus", "2", "--prompt-file", "/nowhere"], "--prompt-file /nowhere: No such file or directory"),
        (["--gpus", "2", "--cache-tokens", "64", "--prompt", "a b " * 200], "--cache-tokens"),
    ],
)
def test_wrong_calls_are_said_once(checkpoint, options, said, generate_here):
    done = generate_here(checkpoint, "--prompt", "x", *options)
    assert done.returncode == 2 and done.stdout == ""
    assert sum(said in line for line in done.stderr.splitlines()) == 1, done.stderr


def test_a_port_in_use_is_said_once(checkpoint, generate_here):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = generate_here(checkpoint, "--prompt", "x", "--gpus", "2", MASTER_PORT=port)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"dsa generate: MASTER_PORT: port {port} of 127.0.0.1 cannot be used")


@pytest.mark.slow
def test_sequences_that_fail_are_said_once(checkpoint, tmp_path, generate_here):
    """By the first rank, which no other ends before it has."""
    changed(checkpoint, tmp_path, lambda tensors: tensors["lm_head.weight"].fill_(math.nan))
    done = generate_here(tmp_path, "--prompt", "x", "--gpus", "2")
    assert done.returncode == 1 and done.stdout.startswith("x")
    report, failure = done.stderr.splitlines()
    assert report.startswith("prefill: ") and "hold NaN or infinity" in failure


def of_rank(rank, parent):
    """The process of that rank, below a process, by what Linux tells of it."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            ids = (entry / "status").read_text()
            mine = int(ids.partition("PPid:")[2].split()[0]) == parent
            if mine and f"RANK={rank}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                return int(entry.name)
    raise AssertionError(f"no rank {rank}")


# Python runs this in every process at its start: in the second rank's, once torch has the generator, the fifth token
# raises RAISED.
FAILS = """
import os, sys
if os.environ.get("RANK") == "1":
    import importlib.abc

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name != "dsa_layers.generation.generator":
                return None
            sys.meta_path.remove(self)
            import torch
            from dsa_layers.generation.passes import Passes
            extend, calls = Passes.extend, []

            def failing(*arguments, **options):
                calls.append(1)
                if len(calls) == 5:
                    raise RAISED
                return extend(*arguments, **options)

            Passes.extend = failing

    sys.meta_path.insert(0, Finder())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("raised", "said", "code"),
    [
        (
            'torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")',
            "dsa generate: CUDA out of memory. Tried to allocate 2.00 GiB",
            1,
        ),
        ('KeyError("a defect")', "KeyError: 'a defect'", 1),
        ("KeyboardInterrupt", "", 130),
    ],
)
def test_a_rank_that_fails_ends_the_others(checkpoint, tmp_path, raised, said, code, generate_here):
    """While it generates: within seconds, and with its own words, those of a defect that nobody expects among them."""
    (tmp_path / "sitecustomize.py").write_text(FAILS.replace("RAISED", raised))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    options = ["--prompt", "x", "--max-tokens", "60000", "--temperature", "0"]
    done = generate_here(checkpoint, *options, "--gpus", "2", PYTHONPATH=path)  # or it would run into the time limit
    assert done.returncode == code and done.stdout.startswith("x")
    *_, cause, end = done.stderr.splitlines()
    assert cause.removeprefix("[rank1]: ") == said, done.stderr  # torch's, before what Python writes
    assert end == f"dsa: rank 1 of 2 ended with exit code {code}; the other ranks have been stopped"


def start(checkpoint, *options):
    """Two ranks that generate until they are ended, once the first one has written the prompt."""
    call = [*COMMAND, str(checkpoint), "--device", "cpu", "--gpus", "2", "--prompt", "x", "--max-tokens", "60000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": reset_signals}
    process = subprocess.Popen([*call, *options], env=ENVIRONMENT, **pipes)
    assert process.stdout.read(4)
    return process


@pytest.mark.slow
def test_nobody_reads_the_output(checkpoint):
    """As in `... | head`: what one process does then all do, and nothing is said."""
    with start(checkpoint) as process:
        process.stdout.close()
        assert process.wait(timeout=SECONDS) == 128 + signal.SIGPIPE, process.stderr.read()
        assert b"dsa: rank" not in process.stderr.read()


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [False, True])
def test_a_rank_that_is_killed_ends_the_others(checkpoint, as_json):
    with start(checkpoint, *["--json"] * as_json) as process:
        killed, first = of_rank(1, process.pid), of_rank(0, process.pid)
        os.kill(killed, signal.SIGKILL)
        out, error = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    told = "rank 1 of 2 was ended by SIGKILL; the other ranks have been stopped"
    assert f"dsa: {told}" in error.decode()
    if as_json:
        event = json.loads(out.decode(errors="replace").splitlines()[-1])
        assert event == {"event": "error", "error": told, "exit_code": 1}
    for pid in (killed, first):
        assert not Path(f"/proc/{pid}").exists()
