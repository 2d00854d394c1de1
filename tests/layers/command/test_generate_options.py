"""`dsa generate`'s options: their defaults, where prompts come from, and what wrong ones are told."""

import io
import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from dsa_layers import SHIPPED_MODEL, Generator, Tokenizer
from dsa_layers.command import model
from dsa_layers.command.main import main
from tests.layers.command.calls import PROMPT, generate

EOS = "<｜end▁of▁sentence｜>"


@pytest.fixture
def given(monkeypatch):
    """The prompts, as token ids, and the parameters that reach the generator, which then gives nothing."""
    calls = []

    def stream(self, prompts, params, on_prefill):
        calls.append((prompts, params))
        yield from ()

    monkeypatch.setattr(Generator, "stream", stream)
    return calls


@pytest.fixture
def loaded(monkeypatch):
    """The options that reach `load_model`, which then refuses."""
    calls = []

    def load(directory, **options):
        calls.append(options)
        raise ValueError("not loaded")

    monkeypatch.setattr(model, "load_model", load)
    return calls


def shipped(*options):
    return main(["generate", "--device", "cpu", "--cache-tokens", "512", *map(str, options)])


def test_options_override_generation_config(given):
    written = json.loads((SHIPPED_MODEL / "generation_config.json").read_text())
    assert written["do_sample"] and 0 < written["temperature"] < 1 and written["top_p"] < 1
    sampled = "--temperature 2 --top-p 1 --top-k 7 --seed 3 --stop a --stop b --min-p 0.1 --repetition-penalty 1.2"
    penalties = "--presence-penalty 0.5 --frequency-penalty -1 --n 3 --logprobs 2 --json"
    for options in ([], ["--temperature", "0"], [*sampled.split(), *penalties.split()]):
        assert shipped("--prompt", "x", *options) == 0
    (_, default), (_, greedy), (_, own) = given
    assert (default.temperature, default.top_p, default.top_k) == (written["temperature"], written["top_p"], 0)
    assert greedy.temperature == 0
    assert (own.temperature, own.top_p, own.top_k, own.seed, own.stop) == (2, 1, 7, 3, ("a", "b"))
    assert (own.n, own.min_p, own.repetition_penalty, own.logprobs) == (3, 0.1, 1.2, 2)
    assert (own.presence_penalty, own.frequency_penalty) == (0.5, -1)


def test_a_checkpoint_without_generation_config_is_greedy(given, damaged):
    (damaged / "generation_config.json").unlink()
    assert main(["generate", str(damaged), "--device", "cpu", "--cache-tokens", "512", "--prompt", "x"]) == 0
    ((_, params),) = given
    assert (params.temperature, params.top_p, params.top_k) == (0, 1, 0)


def test_weights_are_dequantised_only_on_a_cpu(loaded, monkeypatch, checkpoint):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 10**9))
    for device in ([], ["--device", "cpu"]):
        for option in ([], ["--dequantize"], ["--no-dequantize"]):
            assert main(["generate", str(checkpoint), "--prompt", "x", *device, *option]) == 2
    found = [(options["device"].type, options["dequantize"]) for options in loaded]
    assert found == [*zip(["cuda"] * 3, (False, True, False)), *zip(["cpu"] * 3, (True, True, False))]


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ([], {}),
        (["--dtype", "float32", "--kv-cache", "fp8"], {"dtype": torch.float32, "kv_cache": "fp8"}),
        (["--widen-experts", "--draft", "3"], {"widen_experts": True, "drafter": True}),
    ],
)
def test_options_reach_the_model(checkpoint, loaded, monkeypatch, options, changes):
    wanted = {"device": torch.device("cpu"), "dtype": None, "dequantize": True, "kv_cache": None}
    wanted |= {"widen_experts": False, "mesh": None, "drafter": False, "progress": False} | changes
    assert generate(checkpoint, *options) == 2
    assert loaded == [wanted]


def test_the_shipped_model_gets_one_thread_unless_another_number_is_asked_for(loaded, monkeypatch, checkpoint):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert shipped("--prompt", "x") == shipped("--prompt", "x", "--threads", "12") == generate(checkpoint) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert shipped("--prompt", "x") == 2
    assert asked == [1, 12]


def test_without_a_gpu_a_line_says_that_weights_are_dequantised(checkpoint, loaded, capsys):
    told = "No GPU: the model runs on the CPU, and its quantised weights are dequantised, which takes more memory."
    quantised = ["generate", str(checkpoint), "--prompt", "x"]
    for call, lines in [
        (quantised, [told]),
        ([*quantised, "--device", "cpu"], []),
        ([*quantised, "--dequantize"], []),
        (["generate", "--prompt", "x"], []),
    ]:
        assert main(call) == 2
        assert capsys.readouterr().err.splitlines() == [*lines, "dsa generate: not loaded"], call


@pytest.mark.parametrize("started", [None, 2])
def test_several_gpus_where_there_is_none(checkpoint, monkeypatch, error, started):
    """Whether this command would start the ranks or is one of torchrun's."""
    monkeypatch.setattr(model, "started_ranks", lambda: started)
    assert main(["generate", str(checkpoint), "--prompt", "x", *(["--gpus", "2"] if started is None else [])]) == 2
    told = "--gpus: got 2, but torch sees no CUDA GPU; for processes of a CPU give --device cpu"
    assert error() == f"dsa generate: {told}"


def read_by_the_generator(given):
    """The prompts' texts, without the token that begins a text."""
    tokenizer = Tokenizer(SHIPPED_MODEL)
    return [tokenizer.decode(ids[1:]) for ids in given[-1][0]]


def test_prompts_come_from_arguments_files_and_the_standard_input(given, tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes("né\n\n".encode())
    (tmp_path / "b").write_bytes(b"last\r\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"piped\nlines\n")))
    files = [["--prompt-file", str(tmp_path / name)] for name in "ab"]
    assert shipped("--prompt", "first", *files[0], "--prompt", "-", "--prompt", "x\n", *files[1]) == 0
    assert read_by_the_generator(given) == ["first", "né\n", "piped\nlines", "x\n", "last"]


def test_prompts_that_cannot_be_read(tmp_path, monkeypatch, error):
    (tmp_path / "newline").write_text("\n")
    (tmp_path / "binary").write_bytes(b"ab\xff")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xfe")))
    for options, problem in [
        ([], "--prompt: must be given, got none; accepted: --prompt TEXT, --prompt -, --prompt-file FILE"),
        (["--prompt", "-"], r"--prompt -: must be UTF-8, got b'\xfe'"),
        (["--prompt", "-"], "--prompt -: must not be empty, got no text"),  # it has been read
        (["--prompt", "x", "--prompt", ""], "--prompt (prompt 2 of 2): must not be empty, got no text"),
        (["--prompt-file", tmp_path / "newline"], f"--prompt-file {tmp_path}/newline: must not be empty, got no text"),
        (["--prompt-file", tmp_path / "binary"], rf"--prompt-file {tmp_path}/binary: must be UTF-8, got b'\xff'"),
        (["--prompt-file", tmp_path / "none"], f"--prompt-file {tmp_path}/none: No such file or directory"),
        (["--prompt-file", tmp_path], f"--prompt-file {tmp_path}: Is a directory"),
    ]:
        assert shipped(*options) == 2
        assert error() == f"dsa generate: {problem}"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--prompt", "ab\udcc3("), "--prompt (prompt 2 of 2): is not Unicode text: character "),
        (("--stop", "a", "--stop", EOS), f"--stop: must not be a special token, which no text shows, got {EOS!r}"),
        (("--stop", ""), "--stop: must not be empty, got ''"),
        (("--device", "cpu:2"), "--device: must be cpu, cuda or cuda:N, got 'cpu:2'"),
        (("--device", "cuda:1"), "--device: got 'cuda:1', but torch sees no CUDA GPU"),
        (("--cache-tokens", 2**31), "--cache-tokens: must be at most 2147483520, got 2147483648"),
        (("--top-p", "nan"), "--top-p: must be above 0 and at most 1, got nan"),
        (("--temperature", "-1"), "--temperature: must be a finite number of at least 0, got -1.0"),
        (("--top-k", "-1"), "--top-k: must be at least 0 (0 keeps all tokens), got -1"),
        (("--seed", "-1"), "--seed: must be at least 0 and below 2^63, got -1"),
        (("--min-p", "2"), "--min-p: must be at least 0 and at most 1, got 2.0"),
        (("--repetition-penalty", "0"), "--repetition-penalty: must be above 0"),
        (("--presence-penalty", "3"), "--presence-penalty: must be at least -2 and at most 2"),
        (("--n", "0"), "--n: must be at least 1 and at most 16384, got 0"),
        (("--logprobs", "1"), "--logprobs: needs --json"),
    ],
)
def test_wrong_options(checkpoint, error, options, expected):
    assert generate(checkpoint, *options) == 2
    assert error().startswith(f"dsa generate: {expected}")


def test_a_checkpoint_that_is_not_there(tmp_path, error):
    (tmp_path / "file").touch()
    for name in ("nowhere", "file"):
        assert generate(tmp_path / name) == 2
        told = "no such directory; a checkpoint holds config.json and safetensors"
        assert error() == f"dsa generate: {tmp_path / name}: {told}"
    (tmp_path / "other").mkdir()
    assert generate(tmp_path / "other") == 2
    told = "config.json: no such file"
    assert error() == f"dsa generate: {tmp_path / 'other'}/{told}"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer.json", None, "no such file"),
        ("generation_config.json", b'{"top_p": 2}', "field top_p: must be above 0 and at most 1, got 2.0"),
        ("config.json", b'{"model_type": "llama"}', "field 'model_type' is 'llama'; accepted: 'deepseek_v32', "),
    ],
)
def test_files_that_are_wrong(damaged, error, name, content, problem):
    (damaged / name).unlink() if content is None else (damaged / name).write_bytes(content)
    assert generate(damaged) == 2
    assert error().startswith(f"dsa generate: {damaged / name}: {problem}")


def test_a_truncated_shard(damaged, capsys):
    shard = sorted(damaged.glob("*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - 1000)
    assert generate(damaged) == 2
    captured = capsys.readouterr()
    *_, summary, problem = captured.err.splitlines()
    assert captured.out == "" and summary == f"dsa generate: {damaged}: 1 problem, nothing was loaded:"
    assert problem.startswith(f"  {shard.name}: not a safetensors file, or cut short at ")


def test_a_cache_that_cannot_hold_a_prompt_names_the_prompts_option(checkpoint, tmp_path, error):
    file = tmp_path / "cache_tokens"
    file.write_text(PROMPT)
    for options, prompts, source in [
        ((), (PROMPT,), "--prompt"),
        (("--prompt-file", file), (), f"--prompt-file {file}"),
        ((), ("x", PROMPT), "--prompt (prompt 1 of 2)"),
    ]:
        assert generate(checkpoint, "--max-tokens", 200, "--cache-tokens", 128, *options, prompts=prompts) == 2
        line = error()
        assert line.startswith(f"dsa generate: {source}: ") and line.endswith("the cache has 2 (--cache-tokens)")
