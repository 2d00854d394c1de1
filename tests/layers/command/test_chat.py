"""`dsa chat`, run in this process: messages come as lines, replies go to the standard output."""

import pytest

from dsa_layers import SHIPPED_MODEL, Generator, TokenEvent
from dsa_layers.command.generate import assistant_message
from dsa_layers.command.main import main
from tests.layers.io.chat_examples import ASSISTANT, BOS, EOS, USER
from tests.layers.layers.calls import record


@pytest.fixture
def chat(monkeypatch):
    """Return a function that runs `dsa chat` with the input `lines`. Lines may be exceptions, such as Ctrl-C's."""

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


def reply(*pieces):
    return [*(TokenEvent(0, 1, piece, None) for piece in pieces), TokenEvent(0, 1, "", "eos")]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek_v32", "deepseek_v4"])
def test_tiny_checkpoints_reply_and_reuse_the_conversation(tiny_checkpoint, chat, monkeypatch, capsys, model):
    generators = record(monkeypatch, "stream", seen=lambda self, *_, **__: self, owner=Generator)
    assert chat(tiny_checkpoint(model), ["indexer " * 300, "again"], "--chat-option", "thinking=true") == 0
    assert generators[1].throughput.reused_tokens >= 256
    assert capsys.readouterr().out.startswith("<think>")


def test_messages_and_commands_make_the_prompts(checkpoint, chat, stand_in, capsys):
    calls = stand_in(reply("because", "</th", "ink>A1"), reply("A2"), reply("A3"))
    lines = ["Q1", "", "Q2", "/reset", "/usr/bin ?", "/exit", "Q9"]
    assert chat(checkpoint, lines, "--chat-option", "enable_thinking=true", "--system", "S") == 0
    assert [prompt for (prompt,), _ in calls] == [
        f"{BOS}S{USER}Q1{ASSISTANT}<think>",
        f"{BOS}S{USER}Q1{ASSISTANT}</think>A1{EOS}{USER}Q2{ASSISTANT}<think>",
        f"{BOS}S{USER}/usr/bin ?{ASSISTANT}<think>",
    ]
    assert capsys.readouterr().out == "<think>because</think>A1\n<think>A2\n<think>A3\n"


def test_control_c_ends_a_reply_and_at_a_prompt_the_program(checkpoint, chat, stand_in, capsys):
    calls = stand_in([*reply("begun")[:1], KeyboardInterrupt()], reply("A2"))
    assert chat(checkpoint, ["Q1", "Q2", KeyboardInterrupt, "Q3"]) == 130
    assert calls[1][0] == [f"{BOS}{USER}Q1{ASSISTANT}</think>begun{EOS}{USER}Q2{ASSISTANT}</think>"]
    assert capsys.readouterr().out == "begun\nA2\n"


def test_a_message_that_cannot_be_answered_is_left_out(checkpoint, chat, capsys):
    assert chat(checkpoint, ["x " * 1200, "Q"]) == 1
    captured = capsys.readouterr()
    assert "dsa chat: the conversation: " in captured.err and "(--cache-tokens); /reset forgets" in captured.err
    assert captured.out.strip()


def test_wrong_calls_end_the_program_before_a_message_is_read(checkpoint, chat, error):
    special = f"dsa chat: --stop: must not be a special token, which no text shows, got '{USER}'"
    misspelt = ["--chat-option", "thinkin=true"]
    for directory, options, problem in (
        (checkpoint, ["--stop", USER], special),
        (checkpoint, misspelt, "thinkin: is no variable of the chat template; accepted: drop_thinking, "),
        (SHIPPED_MODEL, [], "holds no chat_template"),
    ):
        assert chat(directory, [AssertionError], *options) == 2
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
