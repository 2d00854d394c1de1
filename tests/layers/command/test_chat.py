"""`dsa chat`, run in this process: messages come as lines, replies go to the standard output."""

import io
import os
import signal
import sys
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsa_layers import SHIPPED_MODEL
from dsa_layers.command.main import main
from dsa_layers.command.reply import Reply
from dsa_layers.generation.generator import Generator, TokenEvent

BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
NOT_UTF8 = UnicodeDecodeError("utf-8", b"a\xffb\n", 1, 2, "invalid start byte")


@pytest.fixture
def chat(monkeypatch):
    """Call the command with these lines: strings, or what the standard input raises."""

    def call(checkpoint, lines, *given, terminal=False):
        readline = Mock(side_effect=[*lines, ""])
        monkeypatch.setattr(sys, "stdin", Mock(readline=readline, isatty=lambda: terminal))
        size = ["--device", "cpu", "--cache-tokens", "1024", "--max-tokens", "6", "--temperature", "0"]
        return main(["chat", str(checkpoint), *size, *given])

    return call


@pytest.fixture
def replies(monkeypatch):
    """The generator writes these, and its prompts are added to the list that is returned; None is a Ctrl-C."""

    def stand_in(*texts):
        prompts, waiting = [], iter(texts)

        def stream(self, given, params):
            prompts.extend(given)
            for piece in next(waiting):
                if piece is None:
                    os.kill(os.getpid(), signal.SIGINT)
                else:
                    yield TokenEvent(0, 1, piece, None)
            yield TokenEvent(0, 1, "", "eos")

        monkeypatch.setattr(Generator, "stream", stream)
        return prompts

    return stand_in


def test_the_shipped_model_continues_the_texts(chat, capsys, monkeypatch):
    prompts, stream = [], Generator.stream
    monkeypatch.setattr(Generator, "stream", lambda self, given, p: prompts.extend(given) or stream(self, given, p))
    assert chat(SHIPPED_MODEL, ["def f(x):\n", "\n", "y\n"], "--system", "import os") == 0
    captured = capsys.readouterr()
    reply = prompts[1].removeprefix("import os\ndef f(x):\n").removesuffix("\ny\n")
    assert prompts[0] == "import os\ndef f(x):\n" and captured.out.startswith(f"{reply}\n") and reply
    assert captured.err == "This model continues Python source and does not chat.\n"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek_v32", "deepseek_v4"])
def test_tiny_checkpoints_reply_and_reuse_the_conversation(tiny_checkpoint, chat, monkeypatch, capsys, model):
    generators, stream = [], Generator.stream
    monkeypatch.setattr(Generator, "stream", lambda self, *given: generators.append(self) or stream(self, *given))
    assert chat(tiny_checkpoint(model), ["indexer " * 300 + "\n", "again\n"], "--chat-option", "thinking=true") == 0
    assert generators[1].throughput.reused_tokens >= 256
    assert capsys.readouterr().out.startswith("<think>")


def test_messages_and_commands_make_the_prompts(checkpoint, chat, replies, capsys):
    prompts = replies(["because", "</th", "ink>A1"], ["A2"], ["A3"], ["A4"])
    lines = ["Q1\n", "/system\tS \n", "/help\n", "/nothing\n", "Q2\n", "/reset\n", "/usr/bin ?\n", "/exit\n", "Q9\n"]
    assert chat(checkpoint, lines, "--chat-option", "enable_thinking=true", "--system", "T") == 0
    assert prompts == [
        f"{BOS}T{USER}Q1{ASSISTANT}<think>",
        f"{BOS}S{USER}Q1{ASSISTANT}</think>A1{EOS}{USER}Q2{ASSISTANT}<think>",
        f"{BOS}S{USER}/usr/bin ?{ASSISTANT}<think>",
    ]
    captured = capsys.readouterr()
    assert captured.out == "<think>because</think>A1\n<think>A2</think>\n<think>A3</think>\n"
    assert "/reset" in captured.err and "/nothing: is no command; /help lists them" in captured.err


def test_a_terminal_dims_the_reasoning(checkpoint, chat, replies, monkeypatch):
    replies(["why", "</think>", "A"])
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", output := io.StringIO())
    output.isatty = lambda: True
    assert chat(checkpoint, ["Q\n"], "--chat-option", "thinking=true") == 0
    assert output.getvalue() == "\x1b[2mwhy\x1b[0m\n\nA\n"


def test_control_c_ends_a_reply_and_twice_at_a_prompt_the_conversation(checkpoint, chat, replies, capsys):
    prompts = replies(["begun", None, " and"], ["A2"])
    lines = ["Q1\n", KeyboardInterrupt, "Q2\n", KeyboardInterrupt, KeyboardInterrupt, "Q3\n"]
    assert chat(checkpoint, lines) == 130
    assert prompts[1:] == [f"{BOS}{USER}Q1{ASSISTANT}</think>begun and{EOS}{USER}Q2{ASSISTANT}</think>"]
    assert capsys.readouterr().out == "begun and\nA2\n"


def test_a_message_that_cannot_be_answered_is_left_out(checkpoint, chat, capsys):
    assert chat(checkpoint, ["x " * 1200 + "\n", "Q\n"]) == 1
    captured = capsys.readouterr()
    assert "dsa chat: the conversation: " in captured.err and "(--cache-tokens); /reset forgets it" in captured.err
    assert captured.out.strip()


def test_a_line_of_other_bytes_on_a_terminal_does_not_end_the_conversation(checkpoint, chat, replies, capsys):
    prompts = replies(["A1"], ["A2"])
    assert chat(checkpoint, [NOT_UTF8, "Q1\n", "a\udcff\n", "Q2\n"], terminal=True) == 0
    assert prompts[1] == f"{BOS}{USER}Q1{ASSISTANT}</think>A1{EOS}{USER}Q2{ASSISTANT}</think>"
    assert capsys.readouterr().err.splitlines() == [r"dsa chat: standard input: must be UTF-8, got b'\xff'"] * 2


@pytest.mark.parametrize(
    ("lines", "options", "problem"),
    [
        ([], ["--gpus", "2"], "dsa chat: --gpus: must be 1 for dsa chat, got 2: Ctrl-C would"),
        ([], ["--stop", USER], f"dsa chat: --stop: must not be a special token, which no text shows, got '{USER}'"),
        ([], ["--chat-option", "x"], "argument --chat-option: must be NAME=VALUE, got 'x'"),
        ([], ["--chat-option", "messages=1"], "argument --chat-option: must be another name than messages"),
        (["Q\n"], ["--chat-option", "thinkin=true"], "dsa chat: --chat-option: thinkin: is no option of this chat"),
        ([NOT_UTF8], [], r"dsa chat: standard input: must be UTF-8, got b'\xff'"),
        (["a\udcff\n"], [], r"dsa chat: standard input: must be UTF-8, got b'\xff'"),
    ],
)
def test_wrong_calls(checkpoint, chat, error, lines, options, problem):
    assert chat(checkpoint, lines, *options) == 2
    assert problem in error()


@given(st.lists(st.sampled_from(["<", "<think>", "</th", "ink>", "</think>", "a", " ", "\n"]), max_size=8))
def test_a_reply_is_the_same_in_any_pieces(parts):
    whole, cut = Reply(""), Reply("")
    whole.push("".join(parts), last=True)
    pieces = [piece for part in [*parts, ""] for piece in cut.push(part)] + cut.push("", last=True)
    assert (cut.reasoning, cut.answer) == (whole.reasoning, whole.answer)
    assert "".join(text for reasons, text in pieces if not reasons) == whole.answer


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "answer"),
    [
        ("<think>\n", "a</think>b</think>", "a", "b</think>"),
        ("", "\n<think>a</think>b <think>", "a", "\nb <think>"),
        ("", "b <think>a</think>", "", "b <think>a</think>"),
        ("<think>", "cut sho</thi", "cut sho</thi", ""),
    ],
)
def test_reasoning_is_what_comes_between_marks_before_the_answer(prompt, text, reasoning, answer):
    reply = Reply(prompt)
    reply.push(text, last=True)
    assert (reply.reasoning, reply.answer) == (reasoning, answer)
