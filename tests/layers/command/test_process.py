"""The `dsa` command as a process of its own: interrupts, pipes, closed streams and encodings."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from tests.default_signals import reset_signals

PROMPT = "The lightning indexer"
SECONDS = 300  # for what takes few


def start(arguments, *flags, env=None, before=reset_signals, **options):
    """The command as a process of its own."""
    call = [sys.executable, *flags, "-m", "dsa_layers.command.main", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | (env or {})
    return subprocess.Popen(call, text=True, env=environment, preexec_fn=before, **options)


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@pytest.mark.parametrize("package", ["dsa_layers", "dsa_layers.command"])
def test_the_package_is_the_command(package):
    process = subprocess.run([sys.executable, "-m", package, "check", "--seeds", "0"], **PIPES, text=True)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == "dsa check: argument --seeds: must be at least 1, got 0 (see dsa check --help)\n"


def test_a_failure_is_written_in_one_piece(tmp_path):
    """So that those of several ranks stay apart, also where output is not buffered."""
    written, read = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # a message a write
    with written, read:
        process = start(["generate", tmp_path, "--prompt", "x"], stderr=written, env={"PYTHONUNBUFFERED": "1"})
        assert process.wait(timeout=SECONDS) == 2
        line = read.recv(10_000)
    assert line.startswith(b"dsa generate: ") and line.count(b"\n") == 1 and line.endswith(b"\n")


def interrupted(directory, prefix, before):
    """(exit code, output, errors) of a command that gets SIGINT while modules are imported, as Python tells by a line
    for each of them."""
    process = start(["generate", directory, "--prompt", PROMPT], "-X", "importtime", before=before, **PIPES)
    for line in process.stderr:
        if line.rpartition("|")[2].strip().startswith(prefix):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, [line for line in err.splitlines() if line and not line.startswith("import time:")]


@pytest.mark.parametrize("prefix", ["torch.", "dsa."])
def test_control_c_in_the_first_seconds(tmp_path, prefix):
    assert interrupted(tmp_path, prefix, reset_signals) == (130, "", [])


def test_an_interrupt_that_the_caller_has_ignored_changes_nothing(tmp_path):
    """As a shell has it ignored for jobs in the background."""
    code, _, (problem,) = interrupted(tmp_path, "torch.", lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert code == 2 and problem.startswith(f"dsa generate: {tmp_path}: is empty")


def test_output_that_cannot_be_written():
    """Whether it is written at once or when Python ends."""
    with open("/dev/full", "w") as full:
        for arguments, command in (["--version"], "dsa"), (["check", "--help"], "dsa"), (["plan"], "dsa plan"):
            for unbuffered in ("", "1"):
                env = {"PYTHONUNBUFFERED": unbuffered}
                process = start(arguments, stdout=full, stderr=subprocess.PIPE, env=env)
                _, err = process.communicate(timeout=SECONDS)
                told = f"{command}: standard output: No space left on device\n"
                assert (process.returncode, err) == (2, told), arguments


@pytest.mark.parametrize(
    ("closed", "arguments", "told"),
    [
        (1, ["--version"], "dsa: standard output: must be open, got a closed one\n"),
        (1, ["generate", "--prompt", "x"], "dsa: standard output: must be open, got a closed one\n"),
        (2, ["generate", "--prompt", "x", "--device", "tpu"], ""),
    ],
)
def test_a_closed_stream(closed, arguments, told):
    call = [sys.executable, "-m", "dsa_layers.command.main", *arguments]
    result = subprocess.run(["sh", "-c", f'"$@" {closed}>&-', "sh", *call], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", told)


def test_an_encoding_that_lacks_letters(tmp_path):
    process = start(["generate", tmp_path / "é", "--prompt", "x"], **PIPES, env={"PYTHONIOENCODING": "ascii"})
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 2 and out == ""
    assert err.startswith(f"dsa generate: {tmp_path}/?: no such directory")
