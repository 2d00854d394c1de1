"""`dsa generate` as a process of its own: a pipe on each side, and a terminal."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

GENERATE = [sys.executable, "-m", "dsa_layers.command.main", "generate", "--device", "cpu", "--cache-tokens", "512"]
# Whatever the terminal and the locale are that the tests run in.
SET = {"OMP_NUM_THREADS": "1", "TERM": "xterm", "NO_COLOR": "", "PYTHONIOENCODING": "utf-8"}
ENVIRONMENT = os.environ | SET
SECONDS = 300  # for what takes few


def test_pipes():
    """The prompt comes from one, text alone goes to the others: no style, no progress bar."""
    call = [*GENERATE, "--prompt", "-", "--max-tokens", "3"]
    done = subprocess.run(call, input=b"def \xc3\xa9(\n", capture_output=True, env=ENVIRONMENT)
    assert done.returncode == 0 and done.stdout.startswith("def é(".encode()) and b"\x1b" not in done.stdout
    (line,) = done.stderr.splitlines()
    assert re.match(rb"prefill: \d tokens, ", line)


def on_a_terminal(*options):
    """(exit code, what a terminal shows)"""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    call = [*GENERATE, "--prompt", "def f(", "--max-tokens", "2", *options]
    with subprocess.Popen(call, stdout=theirs, stderr=theirs, env=ENVIRONMENT) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # Linux's way to say that the other side is closed
                break
            if not part:
                break
            shown += part
    os.close(ours)
    return process.returncode, shown


def test_a_terminal():
    """It shows the prompt bold, and a bar while weights are loaded."""
    code, shown = on_a_terminal()
    assert code == 0
    assert b"Loading" in shown and b"\x1b[1mdef f(\x1b[0m" in shown and b"prefill: " in shown
    assert b"Prefill" not in shown and b"--draft" not in shown


@pytest.mark.slow
def test_a_terminal_shows_the_progress_of_a_prompt_that_needs_several_passes():
    code, shown = on_a_terminal("--prefill-chunk", "2")
    assert code == 0 and b"Prefill" in shown
    assert shown.index(b"Prefill") < shown.index(b"\x1b[1mdef f(")


@pytest.mark.slow
def test_a_terminal_is_told_of_drafts(tiny_checkpoint):
    code, shown = on_a_terminal(str(tiny_checkpoint("glm_moe_dsa")))
    assert code == 0 and b"Tip: --draft 1 drafts tokens with the checkpoint's multi-token-prediction layer" in shown


@pytest.mark.slow
def test_a_reader_that_leaves_a_batch_or_events():
    """It ends as a filter does, and says nothing."""
    for options in (["--prompt", "a\nb", "--prompt", "c\nd"], ["--prompt", "a", "--json"]):
        call = [*GENERATE, "--max-tokens", "200", *options]
        process = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT)
        assert process.stdout.read(1) in b"[{"
        process.stdout.close()
        err = process.stderr.read()
        assert (process.wait(timeout=SECONDS), err) == (141, b"")


def test_events_are_ascii_whatever_the_encoding():
    call = [*GENERATE, "--prompt", "-", "--max-tokens", "1", "--json"]
    environment = ENVIRONMENT | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(call, input="é".encode(), capture_output=True, env=environment)
    completions = [event for event in map(json.loads, done.stdout.splitlines()) if event["event"] == "completion"]
    assert done.returncode == 0 and [event["prompt"] for event in completions] == ["é"]
