"""`dsa chat`, run in this process: messages come as lines, replies go to the standard output."""

import io
import os
import signal
import sys

import pytest

from dsa_layers import SHIPPED_MODEL, Generator, TokenEvent
from dsa_layers.command.chat import assistant_message
from dsa_layers.command.main import main

BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"


@pytest.fixture
def chat(monkeypatch):
    """Call the command with these lines; KeyboardInterrupt among them is a Ctrl-C at the prompt."""

    def call(checkpoint, lines, *given):
        waiting = iter(lines)

        def read(prompt):
            line = next(waiting, EOFError)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", read)
        size = ["--device", "cpu", "--cache-tokens", "1024", "--max-tokens", "6", "--temperature", "0"]
        return main(["chat", str(checkpoint), *size, *given])

    return call


@pytest.fixture
def replies(monkeypatch):
    """The generator writes these, and its prompts are added to the list that is returned; None is a Ctrl-C."""

    def stand_in(*texts):
        prompts, waiting = [], iter(texts)

        def stream(self, given, params, on_prefill):
            prompts.extend(given)
            for piece in next(waiting):
                if piece is None:
                    os.kill(os.getpid(), signal.SIGINT)
                    on_prefill(0, 1)
                else:
                    yield TokenEvent(0, 1, piece, None)
            yield TokenEvent(0, 1, "", "eos")

        monkeypatch.setattr(Generator, "stream", stream)
        return prompts

    return stand_in


def test_the_shipped_model_continues_the_texts(chat, capsys, monkeypatch):
    prompts, stream = [], Generator.stream
    monkeypatch.setattr(
        Generator, "stream", lambda self, given, *a, **b: prompts.extend(given) or stream(self, given, *a, **b)
    )
    assert chat(SHIPPED_MODEL, ["def f(x):", "", "y"], "--system", "import os") == 0
    captured = capsys.readouterr()
    reply = prompts[1].removeprefix("import os\ndef f(x):\n").removesuffix("\ny\n")
    assert prompts[0] == "import os\ndef f(x):\n" and captured.out.startswith(f"{reply}\n") and reply
    assert captured.err == "This model continues Python source and does not chat.\n"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek_v32", "deepseek_v4"])
def test_tiny_checkpoints_reply_and_reuse_the_conversation(tiny_checkpoint, chat, monkeypatch, capsys, model):
    generators, stream = [], Generator.stream
    monkeypatch.setattr(Generator, "stream", lambda self, *a, **b: generators.append(self) or stream(self, *a, **b))
    assert chat(tiny_checkpoint(model), ["indexer " * 300, "again"], "--chat-option", "thinking=true") == 0
    assert generators[1].throughput.reused_tokens >= 256
    assert capsys.readouterr().out.startswith("<think>")


def test_messages_and_commands_make_the_prompts(checkpoint, chat, replies, capsys):
    prompts = replies(["because", "</th", "ink>A1"], ["A2"], ["A3"])
    lines = ["Q1", "/system\tS ", "/help", "/nothing", "Q2", "/reset", "/usr/bin ?", "/exit", "Q9"]
    assert chat(checkpoint, lines, "--chat-option", "enable_thinking=true", "--system", "T") == 0
    assert prompts == [
        f"{BOS}T{USER}Q1{ASSISTANT}<think>",
        f"{BOS}S{USER}Q1{ASSISTANT}</think>A1{EOS}{USER}Q2{ASSISTANT}<think>",
        f"{BOS}S{USER}/usr/bin ?{ASSISTANT}<think>",
    ]
    captured = capsys.readouterr()
    assert captured.out == "<think>because</think>A1\n<think>A2\n<think>A3\n"
    assert "/reset" in captured.err and "/nothing: is no command; /help lists them" in captured.err


def test_a_terminal_dims_the_reasoning(checkpoint, chat, replies, monkeypatch):
    replies(["why", "</think>", "A"])
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", output := io.StringIO())
    output.isatty = lambda: True
    assert chat(checkpoint, ["Q"], "--chat-option", "thinking=true") == 0
    assert output.getvalue() == "\x1b[2m<think>\x1b[0m\x1b[2mwhy\x1b[0m</think>A\n"


def test_control_c_ends_a_reply_and_twice_at_a_prompt_the_conversation(checkpoint, chat, replies, capsys):
    prompts = replies(["begun", None, " and"], ["A2"])
    lines = ["Q1", KeyboardInterrupt, "Q2", KeyboardInterrupt, KeyboardInterrupt, "Q3"]
    assert chat(checkpoint, lines) == 130
    assert prompts[1:] == [f"{BOS}{USER}Q1{ASSISTANT}</think>begun{EOS}{USER}Q2{ASSISTANT}</think>"]
    assert capsys.readouterr().out == "begun\nA2\n"


def test_a_message_that_cannot_be_answered_is_left_out(checkpoint, chat, capsys):
    assert chat(checkpoint, ["x " * 1200, "Q"]) == 1
    captured = capsys.readouterr()
    assert "dsa chat: the conversation: " in captured.err and "(--cache-tokens); /reset forgets it" in captured.err
    assert captured.out.strip()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--stop", USER], f"dsa chat: --stop: must not be a special token, which no text shows, got '{USER}'"),
        (["--chat-option", "thinkin=true"], "dsa chat: --chat-option: thinkin: is no variable of the chat"),
        (["--prefill-chunk", "0"], "--prefill-chunk: must be at least 1, got 0"),
    ],
)
def test_wrong_options_end_the_program_before_a_message_is_read(checkpoint, chat, error, options, problem):
    assert chat(checkpoint, [AssertionError], *options) == 2
    assert problem in error()


@pytest.mark.parametrize(
    ("reply", "reasoning", "answer"),
    [
        ("<think>a</think>b</think>", "a", "b</think>"),
        ("\n<think>a</think>b <think>", "a", "b <think>"),
        ("b <think>a</think>", None, "b <think>a</think>"),
        ("<think>cut sho</thi", "cut sho</thi", ""),
    ],
)
def test_reasoning_stands_between_marks_before_the_answer(reply, reasoning, answer):
    message = assistant_message(reply)
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, answer)
