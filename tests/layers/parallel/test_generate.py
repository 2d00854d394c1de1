"""`dsa generate --gpus N` on a CPU: processes of its own, one terminal, one message."""

import json
import os
import subprocess
import sys

import pytest

from dsa_layers.tiny import write_tiny_checkpoint

COMMAND = [sys.executable, "-m", "dsa_layers.command", "generate"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(directory, model="deepseek_v32")
    return directory


def generate(checkpoint, *options, stdin="", start=COMMAND):
    call = [*start, str(checkpoint), "--device", "cpu", "--dtype", "float32", "--max-new-tokens", "8", *options]
    return subprocess.run(call, input=stdin, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)


def test_greedy_text_is_that_of_one_process(checkpoint):
    prompts = ["--prompt", "-", "--prompt", "def f(", "--temperature", "0"]
    one, two = (generate(checkpoint, *prompts, "--gpus", n, stdin="hello world") for n in ("1", "2"))
    assert one.returncode == two.returncode == 0, two.stderr
    assert one.stdout == two.stdout and one.stdout.startswith("[0] hello world")
    (line,) = two.stderr.splitlines()
    assert line.startswith("prefill: ")


def test_seeds_that_nobody_gives_are_the_same_on_all_ranks(checkpoint):
    """Or they would wait for each other: sequences would end at different times."""
    done = generate(checkpoint, "--prompt", "a", "--prompt", "b", "--temperature", "2", "--json", "--gpus", "2")
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events].count("completion") == 2
    assert events[0]["event"] == "start" and events[-1]["event"] == "throughput"


def test_torchrun_starts_ranks_too(checkpoint):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *COMMAND[1:]]
    options = ["--prompt", "def f(", "--temperature", "0"]
    done, one = generate(checkpoint, *options, start=torchrun), generate(checkpoint, *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout == one.stdout
    wrong = generate(checkpoint, *options, "--gpus", "3", start=torchrun)
    assert wrong.returncode == 1 and "--gpus: must be the 2 ranks that were started, got 3" in wrong.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpus", "3"], "gpus: 3 do not evenly share the 4 attention heads of model.layers.0.self_attn"),
        (["--gpus", "0"], "--gpus"),
        (["--gpus", "2", "--prompt-file", "/nowhere"], "--prompt-file: must be a readable file, got /nowhere"),
        (["--gpus", "2", "--cache-tokens", "64", "--prompt", "a b " * 200], "--cache-tokens"),
    ],
)
def test_wrong_calls_are_said_once(checkpoint, options, said):
    done = generate(checkpoint, "--prompt", "x", *options)
    assert done.returncode == 2 and done.stdout == ""
    assert sum(said in line for line in done.stderr.splitlines()) == 1, done.stderr


def test_a_damaged_checkpoint_is_said_once(checkpoint, tmp_path):
    for path in checkpoint.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "model-00003-of-000004.safetensors").unlink()
    done = generate(tmp_path, "--prompt", "x", "--gpus", "2")
    assert done.returncode == 2 and done.stdout == ""
    missing = "model-00003-of-000004.safetensors: missing"
    assert sum(missing in line for line in done.stderr.splitlines()) == 1, done.stderr
