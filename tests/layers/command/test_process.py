"""The `dsa` command in a separate process: pipes, terminals, full disks and encodings."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from tests.default_signals import reset_signals

SECONDS = 300  # timeout; normally a command takes a few seconds
# The threads, terminal and encoding must not depend on the process that runs the tests.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm", "NO_COLOR": "", "PYTHONIOENCODING": "utf-8"}
GENERATE = ["generate", "--device", "cpu", "--cache-tokens", "512"]
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def start(*arguments, before=reset_signals, **options):
    call = [sys.executable, "-m", "dsa_layers", *map(str, arguments)]
    return subprocess.Popen(call, **{"env": ENVIRONMENT, "preexec_fn": before} | options)


def test_output_that_cannot_be_written_is_an_error():
    with open("/dev/full", "w") as full, start("plan", stdout=full, stderr=subprocess.PIPE) as process:
        assert process.communicate(timeout=SECONDS)[1] == b"dsa plan: [Errno 28] No space left on device\n"
    assert process.returncode == 2


def test_pipes_get_text_without_styles_and_without_a_progress_bar():
    with start(*GENERATE, "--prompt", "-", "--max-tokens", "3", stdin=subprocess.PIPE, **PIPES) as process:
        out, err = process.communicate("def é(\n".encode(), timeout=SECONDS)
    assert process.returncode == 0 and out.startswith("def é(".encode()) and b"\x1b" not in out
    (line,) = err.splitlines()
    assert re.match(rb"prefill: \d tokens, ", line)


@pytest.mark.parametrize(("options", "prompt"), [(["--json"], b'"prompt": "\\u00e9"'), ([], b"?")])
def test_any_encoding_takes_the_output(options, prompt):
    call = [*GENERATE, "--prompt", "é", "--max-tokens", "1", *options]
    with start(*call, env=ENVIRONMENT | {"PYTHONIOENCODING": "ascii"}, **PIPES) as process:
        out, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0 and prompt in out


def on_a_terminal(*options):
    """Run `dsa generate` on a pseudo-terminal of 80 columns. Return (exit code, bytes that the terminal shows)."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    call = [*GENERATE, "--max-tokens", "2", *options]
    with start(*call, stdout=theirs, stderr=theirs, before=None) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # Linux raises EIO after the process has closed its side
                break
            shown += part
    os.close(ours)
    return process.returncode, shown


def test_a_terminal_shows_a_bar_while_weights_are_loaded():
    code, shown = on_a_terminal("--prompt", "def f(")
    assert code == 0 and b"Loading" in shown and b"def f(" in shown and b"prefill: " in shown
    assert b"Prefill" not in shown


@pytest.mark.slow
def test_a_terminal_shows_the_progress_of_a_prompt_that_takes_seconds():
    code, shown = on_a_terminal("--prompt", "begin" + " x" * 1000, "--cache-tokens", "4096", "--prefill-chunk", "2")
    assert code == 0 and shown.index(b"Prefill") < shown.index(b"begin x")


@pytest.mark.slow
def test_the_command_ends_as_a_filter_does_if_its_reader_leaves():
    with start(*GENERATE, "--max-tokens", "200", "--prompt", "a", "--json", **PIPES) as process:
        assert process.stdout.read(1) == b"{"
        process.stdout.close()
        assert (process.stderr.read(), process.wait(timeout=SECONDS)) == (b"", 141)
