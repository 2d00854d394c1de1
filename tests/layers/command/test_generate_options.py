"""Options of `dsa generate`: how it loads the model, and its errors for wrong options and damaged checkpoints."""

import io
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from dsa_layers.command import model
from dsa_layers.command.main import main
from tests.layers.command.calls import PROMPT, generate

EOS = "<｜end▁of▁sentence｜>"


@pytest.fixture
def loaded(monkeypatch):
    """Replace `load_model` by a function that raises ValueError. Return a list that collects its keyword arguments."""
    calls = []

    def load(directory, **options):
        calls.append(options)
        raise ValueError("not loaded")

    monkeypatch.setattr(model, "load_model", load)
    return calls


def test_weights_are_dequantised_only_on_a_cpu(loaded, monkeypatch, checkpoint):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 10**9))
    for device in ([], ["--device", "cpu"]):
        for option in ([], ["--dequantize"], ["--no-dequantize"]):
            assert main(["generate", str(checkpoint), "--prompt", "x", *device, *option]) == 2
    found = [(options["device"], options["dequantize"]) for options in loaded]
    assert found == [*zip(["cuda"] * 3, (False, True, False)), *zip(["cpu"] * 3, (True, True, False))]


def test_options_reach_the_model(checkpoint, loaded):
    default = {"device": "cpu", "dtype": None, "dequantize": True, "kv_cache": None, "widen_experts": False}
    default |= {"mesh": None, "drafter": False, "progress": False}
    given = {"dtype": torch.float32, "kv_cache": "fp8", "widen_experts": True, "drafter": True}
    options = "--dtype float32 --kv-cache fp8 --widen-experts --draft 3"
    assert generate(checkpoint) == generate(checkpoint, *options.split()) == 2
    assert loaded == [default, default | given]


def test_only_the_shipped_model_gets_one_thread(loaded, monkeypatch, checkpoint):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    shipped = ["generate", "--device", "cpu", "--prompt", "x"]
    assert main(shipped) == generate(checkpoint) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert main(shipped) == 2
    assert asked == [1]


@pytest.mark.parametrize("started", [None, 2])
def test_several_gpus_where_there_is_none_are_refused(checkpoint, monkeypatch, error, started):
    monkeypatch.setattr(model, "started_ranks", lambda: started)
    assert main(["generate", str(checkpoint), "--prompt", "x", *(["--gpus", "2"] if started is None else [])]) == 2
    told = "--gpus: got 2, but torch sees no CUDA GPU; for processes of a CPU give --device cpu"
    assert error() == f"dsa generate: {told}"


def test_prompts_that_cannot_be_read_are_refused(checkpoint, tmp_path, monkeypatch, error):
    (tmp_path / "newline").write_text("\n")
    (tmp_path / "binary").write_bytes(b"ab\xff")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xfe")))
    for options, problem in [
        ([], "--prompt: must be given, got none; accepted: --prompt TEXT, --prompt -, --prompt-file FILE"),
        (["--prompt", "-"], r"--prompt -: must be UTF-8, got b'\xfe'"),
        (["--prompt", "x", "--prompt", ""], "prompts[1]: must not be empty, got no text"),
        (["--prompt-file", tmp_path / "newline"], "prompts[0]: must not be empty, got no text"),
        (["--prompt-file", tmp_path / "binary"], rf"{tmp_path}/binary: must be UTF-8, got b'\xff'"),
        (["--prompt-file", tmp_path / "none"], f"{tmp_path}/none: No such file or directory"),
    ]:
        assert generate(checkpoint, *options, prompts=()) == 2
        assert error() == f"dsa generate: {problem}"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--prompt", "ab\udcc3("), "prompts[1]: is not Unicode text: character "),
        (("--stop", "a", "--stop", EOS), f"--stop: must not be a special token, which no text shows, got {EOS!r}"),
        (("--device", "cpu:2"), "--device: must be cpu, cuda or cuda:N, got 'cpu:2'"),
        (("--cache-tokens", 2**31), "--cache-tokens: must be at most 2147483520, got 2147483648"),
        (("--top-p", "nan"), "--top-p: must be above 0 and at most 1, got nan"),
        (("--n", "0"), "--n: must be at least 1 and at most 16384, got 0"),
        (("--logprobs", "1"), "--logprobs: needs --json"),
        (("--chat-option", "mood=good"), "mood: is no variable of the chat template; accepted: drop_thinking, "),
        (("--chat-option", "thinking=true", "--raw"), "--chat-option: needs a checkpoint with a chat template"),
    ],
)
def test_wrong_options_are_named(checkpoint, error, options, expected):
    assert generate(checkpoint, *options) == 2
    assert error().startswith(f"dsa generate: {expected}")


def test_a_checkpoint_that_is_no_directory_is_refused(tmp_path, error):
    (tmp_path / "file").touch()
    for name, problem in (("nowhere", "no such directory; accepted: a directory with "), ("file", "not valid JSON: ")):
        assert generate(tmp_path / name) == 2
        assert error().startswith(f"dsa generate: {tmp_path / name}: {problem}")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer.json", None, "no such file"),
        ("generation_config.json", b'{"top_p": 2}', "field top_p: must be above 0 and at most 1, got 2.0"),
        ("config.json", b'{"model_type": "llama"}', "field 'model_type' is 'llama'; accepted: 'axk2', "),
    ],
)
def test_files_that_are_wrong_are_named(damaged, error, name, content, problem):
    (damaged / name).unlink() if content is None else (damaged / name).write_bytes(content)
    assert generate(damaged) == 2
    assert error().startswith(f"dsa generate: {damaged / name}: {problem}")


def test_a_truncated_shard_is_named(damaged, capsys):
    shard = sorted(damaged.glob("*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - 1000)
    assert generate(damaged) == 2
    captured = capsys.readouterr()
    told = f"dsa generate: {damaged}: 1 problem, nothing was loaded:\n  {shard.name}: not a safetensors file, or cut "
    assert captured.out == "" and told in captured.err


def test_a_cache_that_cannot_hold_a_prompt_names_the_prompt_and_the_option(checkpoint, error):
    assert generate(checkpoint, "--max-tokens", 200, "--cache-tokens", 128, prompts=("x", PROMPT)) == 2
    line = error()
    assert line.startswith("dsa generate: prompts[0]: ") and line.endswith("the cache has 2 (--cache-tokens)")
