"""The `dsa` command as a process of its own: interrupts, pipes, closed streams and encodings."""

import os
import signal
import socket
import subprocess
import sys

import pytest

PROMPT = "The lightning indexer"


def start(arguments, *flags, **options):
    """The command as a process of its own."""
    call = [sys.executable, *flags, "-m", "dsa_layers.command.main", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | options.pop("env", {})
    return subprocess.Popen(call, text=True, env=environment, **options)


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def test_the_command_imports_nothing_slow_before_it_can_be_interrupted():
    slow = "{'torch', 'numpy', 'tokenizers', 'dsa'}"
    script = f"import sys, dsa_layers.command.main; sys.exit(bool({slow} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_the_package_is_the_command():
    process = subprocess.run([sys.executable, "-m", "dsa_layers.command", "check", "--seeds", "0"], **PIPES, text=True)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == "dsa check: argument --seeds: must be at least 1, got 0 (see dsa check --help)\n"


def test_a_failure_is_written_in_one_piece(tmp_path):
    """So that those of several ranks stay apart, also where output is not buffered."""
    written, read = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # a message a write
    with written, read:
        process = start(["generate", tmp_path, "--prompt", "x"], stderr=written, env={"PYTHONUNBUFFERED": "1"})
        assert process.wait(timeout=60) == 2
        line = read.recv(10_000)
    assert line.startswith(b"dsa generate: ") and line.count(b"\n") == 1 and line.endswith(b"\n")


@pytest.mark.parametrize("prefix", ["torch.", "dsa."])
def test_control_c_in_the_first_seconds(tmp_path, prefix):
    """While modules are imported, as Python tells by a line for each of them."""
    process = start(["generate", tmp_path, "--prompt", PROMPT], "-X", "importtime", **PIPES)
    for line in process.stderr:
        if line.rpartition("|")[2].strip().startswith(prefix):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    rest = [line for line in err.splitlines() if line and not line.startswith("import time:")]
    assert (process.returncode, out, rest) == (130, "", [])


def test_an_interrupt_that_the_caller_has_ignored_changes_nothing(tmp_path):
    """As a shell has it ignored for jobs in the background."""
    call = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "dsa_layers.command.main",
        "generate",
        str(tmp_path),
        "--prompt",
        "x",
    ]
    process = subprocess.Popen(["sh", "-c", 'trap "" INT; exec "$@"', "sh", *call], text=True, **PIPES)
    for line in process.stderr:
        if line.rpartition("|")[2].strip().startswith("torch."):
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    *_, last = err.splitlines()
    assert process.returncode == 2 and last.startswith(f"dsa generate: {tmp_path / 'tokenizer.json'}: no such file")


def test_a_reader_that_leaves(checkpoint):
    """As of `dsa generate ... | head -c1`: it ends as a filter does, and says nothing."""
    call = ["generate", checkpoint, "--device", "cpu", "--raw", "--prompt", PROMPT, "--max-new-tokens", 30]
    process = start(call, **PIPES)
    assert process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 141
    assert "Traceback" not in err and "dsa generate" not in err and "Exception" not in err and "prefill" not in err


def test_output_that_cannot_be_written():
    """Whether it is written at once or when Python ends."""
    with open("/dev/full", "w") as full:
        for unbuffered in ("", "1"):
            process = start(["--version"], stdout=full, stderr=subprocess.PIPE, env={"PYTHONUNBUFFERED": unbuffered})
            _, err = process.communicate(timeout=60)
            assert (process.returncode, err) == (2, "dsa: [Errno 28] No space left on device\n")


@pytest.mark.parametrize(
    ("closed", "arguments", "code"), [(1, ["--version"], 0), (2, ["generate", "--prompt", "x", "--device", "tpu"], 2)]
)
def test_a_closed_stream(closed, arguments, code):
    call = [sys.executable, "-m", "dsa_layers.command.main", *arguments]
    result = subprocess.run(["sh", "-c", f'"$@" {closed}>&-', "sh", *call], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (code, "", "")


def test_an_encoding_that_lacks_letters(tmp_path):
    process = start(["generate", tmp_path / "é", "--prompt", "x"], **PIPES, env={"PYTHONIOENCODING": "ascii"})
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and out == ""
    assert err.startswith(f"dsa generate: {tmp_path}/?: no such directory")
