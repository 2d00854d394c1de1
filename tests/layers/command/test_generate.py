"""`dsa generate`, run in this process: its output as text and as JSON events."""

import io
import json
import re
import sys

import pytest
import torch

from dsa_layers import SHIPPED_MODEL, Generator, SamplingParams, TokenEvent, Tokenizer, load_model
from dsa_layers.command.main import main
from tests.layers.command.calls import PROMPT, TOKENS, generate
from tests.layers.io.stand_ins import changed

SPEED = r"prefill: \d+ tokens, [\d.]+ tokens/s; decode: \d+ tokens, [\d.]+ tokens/s"


def texts(checkpoint, *prompts, draft_tokens=0):
    """Return the library's texts for these prompts in one call. Other batches may round differently."""
    model = load_model(checkpoint, dequantize=True, drafter=draft_tokens > 0, progress=False)
    generator = Generator(model, Tokenizer(checkpoint), cache_tokens=1024, draft_tokens=draft_tokens)
    return [one.text for one in generator.generate(list(prompts), SamplingParams(max_tokens=TOKENS))]


def events(capsys):
    captured = capsys.readouterr()
    return [json.loads(line) for line in captured.out.splitlines()], captured.err


def test_one_prompt_is_streamed_and_followed_by_the_throughput(checkpoint, monkeypatch, capsys):
    pieces = []

    class Output(io.StringIO):
        def flush(self):
            pieces.append(self.getvalue())

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output := Output())
        assert generate(checkpoint, "--raw") == 0
    assert output.getvalue() == f"{PROMPT}{texts(checkpoint, PROMPT)[0]}\n"
    assert len(set(pieces)) > 3  # flushed piece by piece, not only at the end
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(SPEED + r" \(cpu, backend reference, dequantised, greedy\)", line)


def test_the_chat_format_is_the_default(checkpoint, capsys):
    assert generate(checkpoint) == 0
    prompt = Tokenizer(checkpoint).apply_chat_template([{"role": "user", "content": PROMPT}])
    assert capsys.readouterr().out == f"{PROMPT}\n\n{texts(checkpoint, prompt)[0]}\n"


def test_chat_options_change_the_prompt(checkpoint, monkeypatch):
    prompts = []
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: prompts.append(text) or [1])
    for options in ([], ["--chat-option", "thinking=false", "--chat-option", "enable_thinking=true"]):
        generate(checkpoint, *options)
    assert [prompt.partition("<｜Assistant｜>")[2] for prompt in prompts] == ["</think>", "<think>"]


@pytest.mark.slow
def test_a_checkpoint_without_a_chat_format_gets_the_text_as_it_is(damaged, capsys):
    path = damaged / "tokenizer.json"
    path.write_bytes(path.read_bytes().replace("<｜User｜>".encode(), b"<u>"))
    assert generate(damaged, "--chat-option", "mode=a") == 2
    assert "--chat-option: needs a checkpoint with a chat template or format, and no --raw" in capsys.readouterr().err
    assert generate(damaged) == 0
    captured = capsys.readouterr()
    told = "The checkpoint has no chat template and no known chat format: text is sent as it is"
    assert captured.err.startswith(told) and not captured.out.startswith(f"{PROMPT}\n\n")


def test_each_sequence_of_a_batch_is_printed_whole_when_it_ends(checkpoint, stand_in, capsys):
    pieces = (0, " one"), (1, " x\nsec"), (0, " two\nthree"), (1, "ond", "eos"), (0, " four", "length")
    stand_in([TokenEvent(sequence, 1, text, *(end or [None])) for sequence, text, *end in pieces])
    assert generate(checkpoint, "--raw", prompts=("A\nB", "C")) == 0
    lines = ["[1] C x", "[1] second", "[0] A", "[0] B one two", "[0] three four"]
    assert capsys.readouterr().out.splitlines() == lines


def test_an_interrupt_ends_the_command(checkpoint, stand_in, capsys):
    stand_in([TokenEvent(0, 1, " a", None), KeyboardInterrupt()])
    assert generate(checkpoint, "--raw", prompts=("A",)) == 130
    assert capsys.readouterr() == ("A a", "\n")


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
        # The last token's event comes right before the completion.
        assert between[between.index(completion) - 1] == tokens[-1]
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
    ("raised", "code", "problem"),
    [(ValueError("top_p: is wrong"), 2, "--top-p: is wrong"), (RuntimeError("CUDA error"), 1, "CUDA error")],
)
def test_errors_are_events_and_lines_on_the_standard_error(checkpoint, stand_in, capsys, raised, code, problem):
    stand_in([raised])
    assert generate(checkpoint, "--json") == code
    (_, found), err = events(capsys)
    assert found == {"event": "error", "error": f"dsa generate: {problem}", "exit_code": code}
    assert err == f"dsa generate: {problem}\n"


@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_are_a_failure(checkpoint, tmp_path, capsys, temperature):
    damaged, prompts = changed(checkpoint, tmp_path, lambda x: x["model.norm.weight"].fill_(torch.nan)), (PROMPT, "a")
    assert generate(damaged, "--raw", "--temperature", temperature, prompts=prompts) == 1
    captured = capsys.readouterr()
    for i, line in enumerate(captured.err.splitlines()[-2:]):
        told = rf"dsa generate: prompts\[{i}\]: its logits after \d+ tokens hold NaN or infinity: .*"
        assert re.fullmatch(told, line)
    assert captured.out == "".join(f"[{i}] {prompt}\n" for i, prompt in enumerate(prompts))
    assert generate(damaged, "--raw", "--json", prompts=prompts) == 1
    completions = [event for event in events(capsys)[0] if event["event"] == "completion"]
    assert [(one["finish_reason"], one["tokens"]) for one in completions] == [("error", [])] * 2


def test_options_override_generation_config(stand_in, damaged):
    given = stand_in()
    written = json.loads((SHIPPED_MODEL / "generation_config.json").read_text())
    assert written["do_sample"] and 0 < written["temperature"] < 1 and written["top_p"] < 1
    sampled = "--temperature 2 --top-p 1 --top-k 7 --seed 3 --stop a --stop b --min-p 0.1 --repetition-penalty 1.2"
    penalties = "--presence-penalty 0.5 --frequency-penalty -1 --n 3 --logprobs 2 --json"
    shipped = ["generate", "--device", "cpu", "--cache-tokens", "512", "--prompt", "x"]
    assert main(shipped) == main([*shipped, *sampled.split(), *penalties.split()]) == 0
    (damaged / "generation_config.json").unlink()
    assert main(["generate", str(damaged), *shipped[1:]]) == 0
    (_, default), (_, own), (_, greedy) = given
    assert (default.temperature, default.top_p, default.top_k) == (written["temperature"], written["top_p"], 0)
    assert (greedy.temperature, greedy.top_p, greedy.top_k) == (0, 1, 0)
    assert (own.temperature, own.top_p, own.top_k, own.seed, own.stop) == (2, 1, 7, 3, ("a", "b"))
    assert (own.n, own.min_p, own.repetition_penalty, own.logprobs) == (3, 0.1, 1.2, 2)
    assert (own.presence_penalty, own.frequency_penalty) == (0.5, -1)


def test_prompts_come_from_arguments_files_and_the_standard_input(stand_in, checkpoint, tmp_path, monkeypatch):
    given = stand_in()
    (tmp_path / "a").write_bytes("né\n\n".encode())
    (tmp_path / "b").write_bytes(b"last\r\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"piped\nlines\n")))
    files = [["--prompt-file", str(tmp_path / name)] for name in "ab"]
    options = ["--prompt", "first", *files[0], "--prompt", "-", "--prompt", "x\n", *files[1]]
    assert generate(checkpoint, "--raw", *options, prompts=()) == 0
    tokenizer = Tokenizer(checkpoint)
    read = [tokenizer.decode(ids[1:]) for ids in given[0][0]]  # ids[0] is BOS
    assert read == ["first", "né\n", "piped\nlines", "x\n", "last"]


@pytest.mark.parametrize(
    ("options", "sequences"), [("", 1), ("--prompt y", 2), ("--prompt y --temperature 1 --n 40", 64)]
)
def test_the_cache_is_no_larger_than_its_sequences_need(options, sequences, monkeypatch):
    used = []

    def stream(self, prompts, params, on_prefill):
        used.append(self.capacity)
        yield from ()

    monkeypatch.setattr(Generator, "stream", stream)
    assert main(["generate", "--device", "cpu", "--prompt", "x", *options.split()]) == 0
    (capacity,) = used
    assert capacity.sequences == sequences
    assert capacity.pages == min(sequences * capacity.of(capacity.context), capacity.of(65536))
