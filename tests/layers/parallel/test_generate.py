"""`dsa generate --gpus N` on a CPU: N processes write the text of one process, and report an error once."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsa_layers.command.main import main
from tests.default_signals import reset_signals

COMMAND = [sys.executable, "-m", "dsa_layers", "generate"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
SECONDS = 300  # timeout; normally a command takes a few seconds


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
    """Return a function like `generate` that runs the command in this process, which saves the import of torch."""

    def call(checkpoint, *options, **environment):
        for name, value in ({"OMP_NUM_THREADS": "1"} | environment).items():
            monkeypatch.setenv(name, value)
        code = main(["generate", *arguments(checkpoint, options)])
        written = capfd.readouterr()
        return SimpleNamespace(returncode=code, stdout=written.out, stderr=written.err)

    return call


def test_greedy_text_is_that_of_one_process(checkpoint, generate_here, monkeypatch):
    prompts = ["--prompt", "-", "--prompt", "def f(", "--temperature", "0"]
    two = generate(checkpoint, *prompts, "--gpus", "2", stdin="hello world")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello world")))
    one = generate_here(checkpoint, *prompts, "--gpus", "1")
    assert one.returncode == two.returncode == 0, two.stderr
    assert one.stdout == two.stdout and "[0] hello world" in one.stdout
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
        (["--gpus", "3"], "--gpus: 3 do not evenly share the 4 attention heads of model.layers.0.self_attn"),
        (["--gpus", "2", "--device", "cuda:1"], "--device: must be cpu or cuda, of which each rank takes its own GPU"),
        (["--gpus", "2", "--cache-tokens", "64", "--prompt", "a b " * 200], "--cache-tokens"),
    ],
)
def test_wrong_calls_are_reported_once(checkpoint, options, said, generate_here):
    done = generate_here(checkpoint, "--prompt", "x", *options)
    assert done.returncode == 2 and done.stdout == ""
    assert sum(said in line for line in done.stderr.splitlines()) == 1, done.stderr


def of_rank(rank, parent):
    """Return the process id of a rank, a child of the process `parent`."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            of_parent = int((entry / "status").read_text().partition("PPid:")[2].split()[0])
            if of_parent == parent and f"RANK={rank}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                return int(entry.name)
    raise AssertionError(f"no rank {rank}")


def start(checkpoint, *options):
    """Start two ranks that generate for longer than a test. Return the launcher after rank 0 has written 4 bytes."""
    call = [*COMMAND, str(checkpoint), "--device", "cpu", "--gpus", "2", "--prompt", "x", "--max-tokens", "60000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": reset_signals}
    process = subprocess.Popen([*call, *options], env=ENVIRONMENT, **pipes)
    assert process.stdout.read(4)
    return process


@pytest.mark.slow
def test_ranks_end_silently_if_nobody_reads_the_output(checkpoint):
    with start(checkpoint) as process:
        process.stdout.close()
        assert process.wait(timeout=SECONDS) == 128 + signal.SIGPIPE, process.stderr.read()
        assert b"dsa: rank" not in process.stderr.read()


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_others(checkpoint):
    with start(checkpoint, "--json") as process:
        killed, first = of_rank(1, process.pid), of_rank(0, process.pid)
        os.kill(killed, signal.SIGKILL)
        out, error = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    told = "rank 1 of 2 was ended by SIGKILL; the other ranks have been stopped"
    assert f"dsa: {told}" in error.decode()
    event = json.loads(out.decode(errors="replace").splitlines()[-1])
    assert event == {"event": "error", "error": told, "exit_code": 1}
    assert not any(Path(f"/proc/{pid}").exists() for pid in (killed, first))
