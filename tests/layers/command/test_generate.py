"""`dsa generate`, run in this process: what it shows of one prompt and of several, as text and as events."""

import io
import json
import re
import sys

import pytest
import torch

from dsa_layers.command.main import main
from dsa_layers.generation.generator import Generator, TokenEvent
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.io.loading import load_model
from dsa_layers.io.tokenizer import Tokenizer
from tests.layers.command.calls import PROMPT, TOKENS, generate, replace
from tests.layers.io.stand_ins import changed

SPEED = r"prefill: \d+ tokens, [\d.]+ tokens/s; decode: \d+ tokens, [\d.]+ tokens/s"
REPORT = SPEED + r" \(cpu, backend reference, dequantised, greedy\)"


@pytest.fixture(scope="module")
def greedy(checkpoint):
    """What the library gives for PROMPT, as it stands and as a user's message, and how many tokens are decoded: it may
    end early, as its tokens depend on this project's text."""
    tokenizer = Tokenizer(checkpoint)
    model = load_model(checkpoint, dequantize=True, progress=False)
    generator = Generator(model, tokenizer, cache_tokens=1024)
    prompts = [PROMPT, tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}])]
    # Each by itself, as most tests ask for it: rounding may decide otherwise in a batch.
    raw, chat = (generator.generate(prompt, SamplingParams(max_tokens=TOKENS))[0] for prompt in prompts)
    decoded = {"raw decoded": len(raw.tokens) - 1, "chat decoded": len(chat.tokens) - 1}
    return {"raw": raw.text, "chat": chat.text, **decoded}


def texts(checkpoint, *prompts, draft_tokens=0):
    """Return what the library generates for these prompts together. Rounding may decide otherwise than for one prompt
    and without drafts."""
    model = load_model(checkpoint, dequantize=True, drafter=draft_tokens > 0, progress=False)
    generator = Generator(model, Tokenizer(checkpoint), cache_tokens=1024, draft_tokens=draft_tokens)
    return [one.text for one in generator.generate(list(prompts), SamplingParams(max_tokens=TOKENS))]


def test_several_sequences_of_a_prompt_and_logprobs_in_json(capsys):
    options = ["--n", "2", "--logprobs", "1", "--seed", "4", "--cache-tokens", "256", "--device", "cpu", "--json"]
    assert main(["generate", "--prompt", "def f(", "--prompt", "x", "--max-tokens", "2", *options]) == 0
    start, *events = map(json.loads, capsys.readouterr().out.splitlines())
    done = sorted((e["sequence"], e["prompt"]) for e in events if e["event"] == "completion")
    assert done == [(0, "def f("), (1, "def f("), (2, "x"), (3, "x")] and (start["prompts"], start["n"]) == (2, 2)
    tokens = [(event["token"], event["logprobs"][0]) for event in events if event["event"] == "token"]
    assert all(own["token"] == token and own["logprob"] <= 0 and own["rank"] >= 1 for token, own in tokens)


def poison(tensors):
    tensors["model.norm.weight"][3] = torch.nan


def test_one_prompt_is_echoed_streamed_and_followed_by_the_throughput(checkpoint, greedy, monkeypatch, capsys):
    pieces = []

    class Output(io.StringIO):
        def flush(self):
            pieces.append(self.getvalue())

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output := Output())
        assert generate(checkpoint, "--raw") == 0
    assert output.getvalue() == PROMPT + greedy["raw"] + "\n"
    assert PROMPT in pieces  # at once, before the first token
    assert len(set(pieces)) > min(3, greedy["raw decoded"] - 1)  # seen as it came, not at the end
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(REPORT, line) and f"decode: {greedy['raw decoded']} tokens" in line


def test_the_chat_template_is_the_default(checkpoint, greedy, capsys):
    assert greedy["chat"] != greedy["raw"]
    assert generate(checkpoint) == 0
    assert capsys.readouterr().out == f"{PROMPT}\n\n{greedy['chat']}\n"


def test_chat_options_change_the_prompt(checkpoint, monkeypatch):
    """The checkpoint has a chat format; values are JSON."""
    prompts = []
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: prompts.append(text) or [1])
    for options in ([], ["--chat-option", "thinking=false", "--chat-option", "enable_thinking=true"]):
        generate(checkpoint, *options)
    assert [prompt.partition("<｜Assistant｜>")[2] for prompt in prompts] == ["</think>", "<think>"]


def test_wrong_chat_options(checkpoint, capsys):
    for options, problem in [
        (["mood=good"], "--chat-option: mood: is no option of this chat format; accepted: thinking, enable_thinking"),
        (["thinking=maybe"], "--chat-option: thinking: must be true or false, got 'maybe'"),
        (["thinking=true", "--raw"], "--chat-option: must not be given with --raw"),
    ]:
        assert generate(checkpoint, "--chat-option", *options) == 2
        assert problem in capsys.readouterr().err


@pytest.mark.slow
def test_a_template_and_the_lack_of_one(damaged, capsys):
    """A template that does not compile stops only those who use it; without any a line says so."""
    (damaged / "chat_template.jinja").write_text("{% if %}")
    assert generate(damaged) == 2 and generate(damaged, "--raw") == 0
    assert "chat_template.jinja: chat template: " in capsys.readouterr().err
    (damaged / "chat_template.jinja").write_text("{{ mode }}")
    assert generate(damaged, "--chat-option", "mode=a b") == 0
    (damaged / "chat_template.jinja").unlink()
    replace(
        damaged / "tokenizer.json", (damaged / "tokenizer.json").read_bytes().replace("<｜User｜>".encode(), b"<u>")
    )
    assert generate(damaged, "--chat-option", "mode=a") == 2
    assert "--chat-option: must not be given for a checkpoint without" in capsys.readouterr().err
    assert generate(damaged) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith(
        "The checkpoint has no chat template and no known chat format: text is sent as it is"
    )
    assert captured.out.startswith(PROMPT) and not captured.out.startswith(f"{PROMPT}\n\n")


@pytest.mark.parametrize(
    ("terminal", "environment", "bold"),
    [(True, {}, True), (False, {}, False), (True, {"NO_COLOR": "1"}, False), (True, {"TERM": "dumb"}, False)],
)
def test_the_prompt_is_bold_on_a_terminal_alone(checkpoint, monkeypatch, terminal, environment, bold):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for prompts, begin in ((("a\nb",), "\x1b[1ma\nb\x1b[0m"), (("a\nb", "c"), "[0] \x1b[1ma\x1b[0m\n")):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", output := io.StringIO())
            output.isatty = lambda: terminal
            assert generate(checkpoint, "--raw", prompts=prompts) == 0
        assert output.getvalue().startswith(begin) == bold and ("\x1b" in output.getvalue()) == bold


def stand_in(monkeypatch, *events):
    """The generator gives these, exceptions raised."""

    def stream(self, prompts, params):
        for event in events:
            if isinstance(event, BaseException):
                raise event
            yield event

    monkeypatch.setattr(Generator, "stream", stream)


def test_lines_of_a_batch_are_whole_and_in_the_order_in_which_they_are_complete(checkpoint, monkeypatch, capsys):
    events = [
        TokenEvent(0, 1, " one", None),
        TokenEvent(1, 1, " x\nsec", None),
        TokenEvent(0, 1, " two\nthree", None),
        TokenEvent(1, 1, "ond\n", "eos"),
        TokenEvent(0, 1, " four", "length"),
    ]
    stand_in(monkeypatch, *events)
    assert generate(checkpoint, "--raw", prompts=("A\nB", "C")) == 0
    assert capsys.readouterr().out.splitlines() == [
        "[0] A",
        "[1] C x",
        "[0] B one two",
        "[1] second",
        "[0] three four",
    ]


def test_lines_are_there_before_the_batch_ends(checkpoint, monkeypatch, capsys):
    """And what is unfinished is shown at an interrupt."""
    stand_in(monkeypatch, TokenEvent(1, 1, " x\nrest", None), KeyboardInterrupt())
    assert generate(checkpoint, "--raw", prompts=("A", "C")) == 130
    assert capsys.readouterr().out.splitlines() == ["[1] C x", "[0] A", "[1] rest"]


def events(capsys):
    captured = capsys.readouterr()
    return [json.loads(line) for line in captured.out.splitlines()], captured.err


def test_events_in_json(checkpoint, capsys):
    prompts = (PROMPT, "é\n")
    assert generate(checkpoint, "--raw", "--json", prompts=prompts) == 0
    found, err = events(capsys)
    assert err == ""
    start, *between, throughput = found
    assert start == {
        "event": "start",
        "checkpoint": str(checkpoint),
        "device": "cpu",
        "backend": "reference",
        "dequantized": True,
        "prompts": 2,
        "max_tokens": TOKENS,
        "n": 1,
        "min_p": 0.0,
        **dict.fromkeys(("presence_penalty", "frequency_penalty"), 0.0),
        "repetition_penalty": 1.0,
        "logprobs": None,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 0.95,
        "seed": None,
        "stop": [],
    }
    assert {event["event"] for event in between} == {"token", "completion"}
    completions = {event["sequence"]: event for event in between if event["event"] == "completion"}
    for sequence, completion in completions.items():
        tokens = [event for event in between if event["event"] == "token" and event["sequence"] == sequence]
        assert completion["prompt"] == prompts[sequence]
        assert completion["tokens"] == [event["token"] for event in tokens]
        assert completion["text"] == "".join(event["text"] for event in tokens)
        assert completion["finish_reason"] in ("length", "eos") and completion["error"] is None
        # It comes as soon as the sequence ends.
        assert between.index(completion) == between.index(tokens[-1]) + 1
    assert [completions[i]["text"] for i in range(2)] == texts(checkpoint, *prompts)
    ids = Tokenizer(checkpoint).encode(PROMPT)
    assert completions[0]["prompt_tokens"] == len(ids)
    assert throughput["prefill_tokens"] == sum(event["prompt_tokens"] for event in completions.values())


@pytest.mark.slow
def test_a_prefix_of_several_prompts(checkpoint, capsys):
    """It is computed once, and the text is that without."""
    prompts, told = (f"{PROMPT * 30} a", f"{PROMPT * 30} b"), []
    for option in ([], ["--prefix-cache"]):
        assert generate(checkpoint, "--raw", *option, prompts=prompts) == 0
        told.append(capsys.readouterr())
    assert told[0].out == told[1].out
    computed, reused = map(int, re.match(r"prefill: (\d+) tokens and (\d+) reused, ", told[1].err).groups())
    assert reused > 0 and told[0].err.startswith(f"prefill: {computed + reused} tokens, ")


def test_drafts(checkpoint, capsys):
    """The text, and a line that tells how many were right."""
    assert generate(checkpoint, "--raw", "--draft", "2") == 0
    captured = capsys.readouterr()
    assert captured.out == f"{PROMPT}{texts(checkpoint, PROMPT, draft_tokens=2)[0]}\n"
    report = SPEED + r"; drafts: \d+ of \d+ taken \(cpu, backend reference, dequantised, greedy\)\n"
    assert re.fullmatch(report, captured.err)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--draft", "4"), "argument --draft: invalid choice: 4 (choose from 0, 1, 2, 3) (see dsa generate --help)"),
        (("--top-p", "2"), "argument --top-p: must be above 0 and at most 1, got 2.0 (see dsa generate --help)"),
        (("--max-new-tokens", "2"), "unrecognized arguments: --max-new-tokens 2"),
        (("--prompt", ""), "--prompt (prompt 2 of 2): must not be empty, got no text"),
        (("--logprobs", "99999"), "--logprobs: must be at most the vocabulary of 2048, got 99999"),
        (("--device", "tpu"), "--device: must be cpu, cuda or cuda:N, got 'tpu'"),
    ],
)
def test_errors_in_json(checkpoint, capsys, options, problem):
    """Also those of the parser; a person finds them on the standard error."""
    assert generate(checkpoint, *options, "--json") == 2
    (found,), err = events(capsys)
    assert set(found) == {"event", "error", "exit_code"} and (found["event"], found["exit_code"]) == ("error", 2)
    assert problem in found["error"] and err == found["error"] + "\n"


def test_a_defect_in_json(checkpoint, capsys, monkeypatch):
    """Python's traceback goes to the standard error."""
    monkeypatch.setattr(Generator, "stream", lambda *_: {}["missing"])
    with pytest.raises(KeyError):
        generate(checkpoint, "--json")
    *_, last = events(capsys)[0]
    assert last == {"event": "error", "error": "KeyError: 'missing'", "exit_code": 1}


def test_keys_read(tmp_path, checkpoint, capsys):
    """Of a prompt of 200 tokens and of the three that follow it, 128 keys at most; without a fourth pass, since the
    last token is not read. The tiny checkpoint selects 128."""
    tokenizer, prompt = Tokenizer(checkpoint), tmp_path / "prompt"
    prompt.write_text(tokenizer.decode(tokenizer.encode("a b c d " * 100)[:200]), newline="")
    tokens = len(tokenizer.encode(prompt.read_text()))
    contexts = range(1, tokens + 4)
    read, context = (sum(values) / len(contexts) for values in ([min(n, 128) for n in contexts], contexts))
    options = ["--raw", "--prompt-file", prompt, "--stats", "--max-tokens", 4]
    assert generate(checkpoint, *options, prompts=()) == 0
    assert capsys.readouterr().err.splitlines()[-2] == (
        f"keys read: {read:.1f} a token of the {context:.1f} in its context ({read / context:.0%}), at most 128 of "
        f"{tokens + 3}"
    )
    assert generate(checkpoint, *options, "--json", prompts=()) == 0
    expected = {"event": "keys_read", "most_read": 128, "most_dense": tokens + 3, "longest_context": tokens + 3}
    expected |= {"read": read, "dense": context, "context": context, "share": read / context}
    assert events(capsys)[0][-1] == pytest.approx(expected)


def test_keys_of_deepseek_v4(tiny_checkpoint, capsys):
    """A window of 128 tokens and entries beside it: more keys than tokens in a short context, and never more than dense
    attention reads."""
    assert generate(tiny_checkpoint("deepseek_v4"), "--raw", "--stats", "--max-tokens", 4) == 0
    line, words, _ = capsys.readouterr().err.splitlines()[-3:]
    pattern = r"keys read: (\S+) a token of the (\S+) that dense attention reads \(100%\), at most (\d+) of (\d+)"
    read, dense, most_read, most_dense = re.fullmatch(pattern, line).groups()
    pattern = r"keys are the tokens of a window and compressed entries, .* has (\S+) tokens, at most (\d+)"
    context, longest = re.fullmatch(pattern, words).groups()
    assert read == dense and most_read == most_dense
    assert float(dense) > float(context) and int(most_dense) > int(longest)


@pytest.mark.parametrize("prompts", [(PROMPT,), (PROMPT, "a")])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_are_a_failure(checkpoint, tmp_path, capsys, prompts, temperature):
    """Of weights that hold a NaN: one line a sequence on the standard error, and the exit code of a failure."""
    damaged = changed(checkpoint, tmp_path, poison)
    assert generate(damaged, "--raw", "--temperature", temperature, prompts=prompts) == 1
    captured = capsys.readouterr()
    lines = captured.err.splitlines()[-len(prompts) :]
    names = ["--prompt"] if len(prompts) == 1 else ["--prompt (prompt 1 of 2)", "--prompt (prompt 2 of 2)"]
    for line, name in zip(lines, names, strict=True):
        told = rf"dsa generate: {re.escape(name)}: its logits after \d+ tokens hold NaN or infinity: .*"
        assert re.fullmatch(told, line)
    assert "Traceback" not in captured.err
    shown = f"{PROMPT}\n" if len(prompts) == 1 else "".join(f"[{i}] {prompt}\n" for i, prompt in enumerate(prompts))
    assert captured.out == shown
    assert generate(damaged, "--raw", "--json", prompts=prompts) == 1
    completions = [event for event in events(capsys)[0] if event["event"] == "completion"]
    assert [(one["finish_reason"], one["tokens"]) for one in completions] == [("error", [])] * len(prompts)
    assert all("hold NaN or infinity" in completion["error"] for completion in completions)


def test_a_failure_is_no_wrong_call(checkpoint, monkeypatch, capsys):
    for raised, line in [(RuntimeError("CUDA error"), "CUDA error"), (MemoryError(), "out of memory")]:
        stand_in(monkeypatch, raised)
        assert generate(checkpoint) == 1
        assert capsys.readouterr().err.splitlines()[-1] == f"dsa generate: {line}"


def test_control_c(checkpoint, monkeypatch, capsys):
    stand_in(monkeypatch, TokenEvent(0, 5, "begun", None), KeyboardInterrupt())
    assert generate(checkpoint, "--raw") == 130
    captured = capsys.readouterr()
    assert captured.out == f"{PROMPT}begun\n" and captured.err == "\n"
