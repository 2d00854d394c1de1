"""`dsa generate`, run in this process: what it shows of one prompt and of several, as text and as events."""

import io
import json
import re
import sys

import pytest
import torch

from dsa_layers import Generator, SamplingParams, TokenEvent, Tokenizer, load_model
from dsa_layers.command.main import main
from tests.layers.command.calls import PROMPT, TOKENS, generate
from tests.layers.io.stand_ins import changed

SPEED = r"prefill: \d+ tokens, [\d.]+ tokens/s; decode: \d+ tokens, [\d.]+ tokens/s"


def texts(checkpoint, *prompts, draft_tokens=0):
    """What the library generates for these prompts together. Rounding may decide otherwise for each prompt alone, and
    without drafts."""
    model = load_model(checkpoint, dequantize=True, drafter=draft_tokens > 0, progress=False)
    generator = Generator(model, Tokenizer(checkpoint), cache_tokens=1024, draft_tokens=draft_tokens)
    return [one.text for one in generator.generate(list(prompts), SamplingParams(max_tokens=TOKENS))]


def in_chat_format(checkpoint, prompt):
    return Tokenizer(checkpoint).apply_chat_template([{"role": "user", "content": prompt}])


def events(capsys):
    captured = capsys.readouterr()
    return [json.loads(line) for line in captured.out.splitlines()], captured.err


@pytest.fixture
def stand_in(monkeypatch):
    """Make the generator give these events, and raise the exceptions among them."""

    def install(*events):
        def stream(self, prompts, params, on_prefill):
            for event in events:
                if isinstance(event, BaseException):
                    raise event
                yield event

        monkeypatch.setattr(Generator, "stream", stream)

    return install


def test_one_prompt_is_streamed_and_followed_by_the_throughput(checkpoint, monkeypatch, capsys):
    pieces = []

    class Output(io.StringIO):
        def flush(self):
            pieces.append(self.getvalue())

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output := Output())
        assert generate(checkpoint, "--raw") == 0
    assert output.getvalue() == f"{PROMPT}{texts(checkpoint, PROMPT)[0]}\n"
    assert PROMPT in pieces and len(set(pieces)) > 3  # seen as it came, not at the end
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(SPEED + r" \(cpu, backend reference, dequantised, greedy\)", line)


def test_the_chat_format_is_the_default(checkpoint, capsys):
    assert generate(checkpoint) == 0
    (expected,) = texts(checkpoint, in_chat_format(checkpoint, PROMPT))
    assert capsys.readouterr().out == f"{PROMPT}\n\n{expected}\n"


def test_chat_options_change_the_prompt(checkpoint, monkeypatch):
    """Values are JSON."""
    prompts = []
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: prompts.append(text) or [1])
    for options in ([], ["--chat-option", "thinking=false", "--chat-option", "enable_thinking=true"]):
        generate(checkpoint, *options)
    assert [prompt.partition("<｜Assistant｜>")[2] for prompt in prompts] == ["</think>", "<think>"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["mood=good"], "--chat-option: mood: is no variable of the chat template; accepted: drop_thinking, enable_"),
        (["thinking=maybe"], "deepseek_v32.jinja: chat template: thinking: must be true or false, got maybe"),
        (["thinking=true", "--raw"], "--chat-option: must not be given with --raw"),
    ],
)
def test_a_wrong_chat_option_is_named(checkpoint, error, options, problem):
    assert generate(checkpoint, "--chat-option", *options) == 2 and problem in error()


@pytest.mark.slow
def test_a_template_that_does_not_compile_stops_only_those_who_use_it(damaged, capsys):
    (damaged / "chat_template.jinja").write_text("{% if %}")
    assert generate(damaged) == 2 and generate(damaged, "--raw") == 0
    assert "chat_template.jinja: chat template: " in capsys.readouterr().err
    (damaged / "chat_template.jinja").write_text("{{ mode }}")
    assert generate(damaged, "--chat-option", "mode=a b") == 0


@pytest.mark.slow
def test_a_checkpoint_without_a_chat_format_gets_the_text_as_it_is(damaged, capsys):
    path = damaged / "tokenizer.json"
    path.write_bytes(path.read_bytes().replace("<｜User｜>".encode(), b"<u>"))
    assert generate(damaged, "--chat-option", "mode=a") == 2
    assert "--chat-option: must not be given for a checkpoint without" in capsys.readouterr().err
    assert generate(damaged) == 0
    captured = capsys.readouterr()
    told = "The checkpoint has no chat template and no known chat format: text is sent as it is"
    assert captured.err.startswith(told) and not captured.out.startswith(f"{PROMPT}\n\n")


@pytest.mark.parametrize(
    ("terminal", "environment", "bold"),
    [(True, {}, True), (False, {}, False), (True, {"NO_COLOR": "1"}, False), (True, {"TERM": "dumb"}, False)],
)
def test_the_prompt_is_bold_only_on_a_terminal(checkpoint, monkeypatch, stand_in, terminal, environment, bold):
    stand_in(TokenEvent(0, 1, " x", "eos"))
    for name, value in ({"TERM": "xterm", "NO_COLOR": ""} | environment).items():
        monkeypatch.setenv(name, value)
    for prompts, styled in (
        (("a\nb",), "\x1b[1ma\x1b[0m\n\x1b[1mb\x1b[0m x"),
        (("a\nb", "c"), "[0] \x1b[1ma\x1b[0m\n[0] \x1b[1mb\x1b[0m x"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", output := io.StringIO())
            output.isatty = lambda: terminal
            assert generate(checkpoint, "--raw", prompts=prompts) == 0
        assert output.getvalue() == (styled if bold else re.sub(r"\x1b\[\dm", "", styled)) + "\n"


def test_lines_of_a_batch_are_whole_and_in_the_order_in_which_they_are_complete(checkpoint, stand_in, capsys):
    stand_in(
        TokenEvent(0, 1, " one", None),
        TokenEvent(1, 1, " x\nsec", None),
        TokenEvent(0, 1, " two\nthree", None),
        TokenEvent(1, 1, "ond\n", "eos"),
        TokenEvent(0, 1, " four", "length"),
    )
    assert generate(checkpoint, "--raw", prompts=("A\nB", "C")) == 0
    lines = ["[0] A", "[1] C x", "[0] B one two", "[1] second", "[0] three four"]
    assert capsys.readouterr().out.splitlines() == lines


def test_an_interrupt_shows_the_lines_that_are_not_complete(checkpoint, stand_in, capsys):
    stand_in(TokenEvent(0, 1, " a", None), TokenEvent(1, 1, " x\nrest", None), KeyboardInterrupt())
    assert generate(checkpoint, "--raw", prompts=("A", "C")) == 130
    assert capsys.readouterr() == ("[1] C x\n[0] A a\n[1] rest\n", "\n")


def test_events_in_json(checkpoint, capsys):
    prompts = (PROMPT, "é\n")
    assert generate(checkpoint, "--raw", "--json", prompts=prompts) == 0
    (start, *between, throughput), err = events(capsys)
    assert err == ""
    place = {"checkpoint": str(checkpoint), "device": "cpu", "backend": "reference", "dequantized": True}
    sampling = {"max_tokens": TOKENS, "temperature": 0.0, "top_k": 0, "top_p": 0.95, "seed": None, "stop": [], "n": 1}
    penalties = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert start == {"event": "start", "prompts": 2, "min_p": 0.0, "logprobs": None} | place | sampling | penalties
    assert {event["event"] for event in between} == {"token", "completion"}
    completions = {event["sequence"]: event for event in between if event["event"] == "completion"}
    for sequence, completion in completions.items():
        tokens = [event for event in between if event["event"] == "token" and event["sequence"] == sequence]
        assert completion["prompt"] == prompts[sequence]
        assert completion["tokens"] == [event["token"] for event in tokens]
        assert completion["text"] == "".join(event["text"] for event in tokens)
        assert completion["finish_reason"] in ("length", "eos") and completion["error"] is None
        assert between.index(completion) == between.index(tokens[-1]) + 1
    assert [completions[i]["text"] for i in range(2)] == texts(checkpoint, *prompts)
    assert completions[0]["prompt_tokens"] == len(Tokenizer(checkpoint).encode(PROMPT))
    assert throughput["prefill_tokens"] == sum(event["prompt_tokens"] for event in completions.values())


def test_several_sequences_per_prompt_and_logprobs_in_json(capsys):
    options = ["--n", "2", "--logprobs", "1", "--seed", "4", "--cache-tokens", "256", "--device", "cpu", "--json"]
    assert main(["generate", "--prompt", "def f(", "--prompt", "x", "--max-tokens", "2", *options]) == 0
    (start, *between), _ = events(capsys)
    done = sorted((e["sequence"], e["prompt"]) for e in between if e["event"] == "completion")
    assert done == [(0, "def f("), (1, "def f("), (2, "x"), (3, "x")] and (start["prompts"], start["n"]) == (2, 2)
    tokens = [(event["token"], event["logprobs"][0]) for event in between if event["event"] == "token"]
    assert all(own["token"] == token and own["logprob"] <= 0 and own["rank"] >= 1 for token, own in tokens)


def test_drafts_are_counted(checkpoint, capsys):
    assert generate(checkpoint, "--raw", "--draft", "2") == 0
    captured = capsys.readouterr()
    assert captured.out == f"{PROMPT}{texts(checkpoint, PROMPT, draft_tokens=2)[0]}\n"
    assert re.fullmatch(SPEED + r"; drafts: \d+ of \d+ taken \(cpu, backend reference, .*\n", captured.err)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--max-new-tokens", "2"), "unrecognized arguments: --max-new-tokens 2"),
        (("--prompt", ""), "--prompt (prompt 2 of 2): must not be empty, got no text"),
        (("--device", "tpu"), "--device: must be cpu, cuda or cuda:N, got 'tpu'"),
    ],
)
def test_errors_are_events_and_lines_on_the_standard_error(checkpoint, capsys, options, problem):
    assert generate(checkpoint, *options, "--json") == 2
    (found,), err = events(capsys)
    assert set(found) == {"event", "error", "exit_code"} and (found["event"], found["exit_code"]) == ("error", 2)
    assert problem in found["error"] and err == found["error"] + "\n"


def test_a_defect_is_an_event_and_a_traceback(checkpoint, capsys, stand_in):
    stand_in(KeyError("missing"))
    with pytest.raises(KeyError):
        generate(checkpoint, "--json")
    assert events(capsys)[0][-1] == {"event": "error", "error": "KeyError: 'missing'", "exit_code": 1}


@pytest.mark.parametrize(
    ("raised", "line"), [(RuntimeError("CUDA error"), "CUDA error"), (MemoryError(), "out of memory")]
)
def test_a_failure_is_no_wrong_call(checkpoint, stand_in, capsys, raised, line):
    stand_in(raised)
    assert generate(checkpoint) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"dsa generate: {line}"


def test_keys_read(tmp_path, checkpoint, capsys):
    """Of a prompt of 200 tokens and of the three that follow it, 128 keys at most: the tiny checkpoint selects 128. The
    last token is not read."""
    tokenizer, prompt = Tokenizer(checkpoint), tmp_path / "prompt"
    prompt.write_text(tokenizer.decode(tokenizer.encode("a b c d " * 100)[:200]), newline="")
    tokens = len(tokenizer.encode(prompt.read_text()))
    contexts = range(1, tokens + 4)
    read, context = (sum(values) / len(contexts) for values in ([min(n, 128) for n in contexts], contexts))
    options = ["--raw", "--prompt-file", prompt, "--stats", "--max-tokens", 4]
    assert generate(checkpoint, *options, prompts=()) == 0
    assert capsys.readouterr().err.splitlines()[-2] == (
        f"keys read: {read:.1f} a token of the {context:.1f} that dense attention reads ({read / context:.0%}), at "
        f"most 128 of {tokens + 3}; context: {context:.1f} tokens, at most {tokens + 3}"
    )
    assert generate(checkpoint, *options, "--json", prompts=()) == 0
    expected = {"event": "keys_read", "most_read": 128, "most_dense": tokens + 3, "longest_context": tokens + 3}
    expected |= {"read": read, "dense": context, "context": context, "share": read / context}
    assert events(capsys)[0][-1] == pytest.approx(expected)


def poison(tensors):
    tensors["model.norm.weight"][3] = torch.nan


@pytest.mark.parametrize("prompts", [(PROMPT,), (PROMPT, "a")])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_are_a_failure(checkpoint, tmp_path, capsys, prompts, temperature):
    """Weights hold a NaN: one line per sequence on the standard error, and the exit code of a failure."""
    damaged = changed(checkpoint, tmp_path, poison)
    assert generate(damaged, "--raw", "--temperature", temperature, prompts=prompts) == 1
    captured = capsys.readouterr()
    names = ["--prompt"] if len(prompts) == 1 else ["--prompt (prompt 1 of 2)", "--prompt (prompt 2 of 2)"]
    for line, name in zip(captured.err.splitlines()[-len(prompts) :], names, strict=True):
        told = rf"dsa generate: {re.escape(name)}: its logits after \d+ tokens hold NaN or infinity: .*"
        assert re.fullmatch(told, line)
    shown = f"{PROMPT}\n" if len(prompts) == 1 else "".join(f"[{i}] {prompt}\n" for i, prompt in enumerate(prompts))
    assert captured.out == shown
    assert generate(damaged, "--raw", "--json", prompts=prompts) == 1
    completions = [event for event in events(capsys)[0] if event["event"] == "completion"]
    assert [(one["finish_reason"], one["tokens"]) for one in completions] == [("error", [])] * len(prompts)
    assert all("hold NaN or infinity" in completion["error"] for completion in completions)
