"""The `dsa` command, run in this process: what it prints, where, and with which exit code."""

import importlib.metadata
import io
import json
import re
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

import dsa
from dsa.self_test import SELF_TESTS
from dsa_layers.checkpoint.loading import load_model
from dsa_layers.command import health
from dsa_layers.command.main import main
from dsa_layers.generation.generator import Generator, TokenEvent
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.generation.tokenizer import Tokenizer

PROMPT = "The lightning indexer"
TOKENS = 8
THROUGHPUT = r"prefill: \d+ tokens, [\d.]+ tokens/s; decode: \d+ tokens, [\d.]+ tokens/s \(cpu, backend reference\)"


@pytest.fixture(scope="module")
def greedy(checkpoint):
    """What the library gives for PROMPT, as it stands and as a user's message, and how many tokens are decoded: it may
    end early, as its tokens depend on this project's text."""
    tokenizer = Tokenizer(checkpoint)
    generator = Generator(load_model(checkpoint, progress=False), tokenizer, cache_tokens=1024)
    prompts = [PROMPT, tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}])]
    raw, chat = generator.generate(prompts, SamplingParams(max_new_tokens=TOKENS))
    decoded = {"raw decoded": len(raw.tokens) - 1, "chat decoded": len(chat.tokens) - 1}
    return {"raw": raw.text, "chat": chat.text, **decoded}


@pytest.fixture
def damaged(checkpoint, tmp_path):
    """A copy of the checkpoint, its files links: to damage one, replace it."""
    directory = tmp_path / "damaged"
    directory.mkdir()
    for path in checkpoint.iterdir():
        (directory / path.name).symlink_to(path)
    return directory


def replace(path, content):
    path.unlink()
    path.write_bytes(content)


def generate(checkpoint, *options, prompts=(PROMPT,)):
    named = [part for prompt in prompts for part in ("--prompt", prompt)]
    size = ["--max-new-tokens", str(TOKENS), "--cache-tokens", "1024"]
    return main(["generate", str(checkpoint), "--device", "cpu", *named, *size, *map(str, options)])


def test_one_prompt_is_streamed_and_followed_by_the_throughput(checkpoint, greedy, monkeypatch, capsys):
    pieces = []

    class Output(io.StringIO):
        def flush(self):
            pieces.append(self.getvalue())

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output := Output())
        assert generate(checkpoint, "--raw") == 0
    assert output.getvalue() == greedy["raw"] + "\n"
    assert len(set(pieces)) > min(3, greedy["raw decoded"] - 1)  # seen as it came, not at the end
    *_, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(THROUGHPUT, last) and f"decode: {greedy['raw decoded']} tokens" in last


def test_the_chat_template_is_the_default(checkpoint, greedy, capsys):
    assert greedy["chat"] != greedy["raw"]
    assert generate(checkpoint) == 0
    assert capsys.readouterr().out == greedy["chat"] + "\n"


def test_a_batch_prints_each_prompt_and_its_completion(checkpoint, greedy, capsys):
    assert generate(checkpoint, prompts=(PROMPT, "a", PROMPT)) == 0
    captured = capsys.readouterr()
    block = f"[{PROMPT}]\n{greedy['chat']}\n\n"
    assert captured.out.startswith(block + "[a]\n") and captured.out.endswith("\n\n" + block)
    decoded = int(re.search(r"decode: (\d+) tokens", captured.err)[1])
    assert 0 <= decoded - 2 * greedy["chat decoded"] <= TOKENS - 1


def test_stop(checkpoint, greedy, capsys):
    text = greedy["raw"]
    stop = text[len(text) // 2 :][:3]
    assert generate(checkpoint, "--raw", "--stop", "never there", "--stop", stop) == 0
    shown = capsys.readouterr().out
    assert shown == text[: text.index(stop)] + "\n" and len(shown) < len(text)


def test_a_seed_repeats_its_text(checkpoint, greedy, capsys):
    shown = []
    for seed in (1, 1, 2):
        assert generate(checkpoint, "--raw", "--temperature", 1, "--seed", seed) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2]
    assert greedy["raw"] + "\n" not in shown


def test_sampling_options_reach_the_sampler(checkpoint, greedy, capsys):
    for option in (("--top-k", 1), ("--top-p", 1e-9)):
        assert generate(checkpoint, "--raw", "--temperature", 5, "--seed", 1, *option) == 0
        assert capsys.readouterr().out == greedy["raw"] + "\n"


def test_precision_options_reach_the_model(checkpoint, monkeypatch, capsys):
    asked = []

    def load(directory, **options):
        asked.append(options)
        raise ValueError("not loaded")

    monkeypatch.setattr("dsa_layers.checkpoint.loading.load_model", load)
    assert generate(checkpoint) == generate(checkpoint, "--dtype", "float32", "--dequantize", "--kv-cache", "fp8") == 2
    assert asked == [
        {"device": "cpu", "dtype": None, "dequantize": False, "kv_cache": None},
        {"device": "cpu", "dtype": torch.float32, "dequantize": True, "kv_cache": "fp8"},
    ]


def error(capsys):
    """The one line of a wrong call; nothing went to the standard output."""
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--prompt", ""), "--prompt: must not be empty"),
        (("--top-p", "1.5"), "top_p: must be above 0 and at most 1, got 1.5"),
        (("--temperature", "-1"), "temperature: must be a finite number of at least 0, got -1.0"),
        (("--seed", "-1"), "seed: must be at least 0 and below 2^63, got -1"),
        (("--stop", ""), "stop: strings must not be empty"),
        (("--stop", "\udcff"), r"--stop: must be UTF-8, got '\udcff'"),
        (("--prompt", "ab\udcc3("), r"--prompt: must be UTF-8, got 'ab\udcc3('"),
        (("--seed", "9" * 30), f"seed: must be at least 0 and below 2^63, got {'9' * 30}"),
        (("--top-p", "nan"), "top_p: must be above 0 and at most 1, got nan"),
        (("--top-k", "-1"), "top_k: must be at least 0 (0 keeps all tokens), got -1"),
        (("--device", "gpu"), "--device: must be cpu, cuda or cuda:N, got 'gpu'"),
        (("--device", "tpu"), "--device: must be cpu, cuda or cuda:N, got 'tpu'"),
        (("--device", "cpu:2"), "--device: must be cpu, cuda or cuda:N, got 'cpu:2'"),
        (("--device", ""), "--device: must be cpu, cuda or cuda:N, got ''"),
        (("--device", "cuda:1"), "--device: got 'cuda:1', but torch sees no CUDA GPU"),
    ],
)
def test_wrong_options(checkpoint, monkeypatch, capsys, options, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert generate(checkpoint, *options) == 2
    assert error(capsys) == f"dsa generate: {expected}"


@pytest.mark.parametrize("option", ["--max-new-tokens", "--cache-tokens", "--prefill-chunk"])
def test_sizes_are_positive(checkpoint, capsys, option):
    for value, problem in [
        ("0", "must be at least 1, got 0"),
        ("-5", "must be at least 1, got -5"),
        ("1e3", "must be an integer, got '1e3'"),
        ("9" * 5000, f"must be an integer, got '{'9' * 60}'"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            generate(checkpoint, option, value)
        assert error(capsys) == f"dsa generate: argument {option}: {problem} (see dsa generate --help)"


def test_a_prompt_in_utf8_under_another_locale(checkpoint, greedy, monkeypatch, capsys):
    """Its bytes come as surrogates."""
    prompts = []
    monkeypatch.setattr(Generator, "generate", lambda self, texts, *rest, **more: prompts.extend(texts) or [])
    assert generate(checkpoint, "--raw", prompts=("d\udcc3\udca9f",)) == 0
    assert prompts == ["déf"]


def test_a_missing_directory(tmp_path, capsys):
    (tmp_path / "file").touch()
    for name in ("nowhere", "file", "file/within"):
        assert generate(tmp_path / name) == 2
        assert error(capsys).startswith(f"dsa generate: {tmp_path / name}: no such directory")
    assert generate("a" * 300) == 2
    assert error(capsys) == f"dsa generate: {'a' * 300}: File name too long"


def test_a_directory_without_a_tokenizer(damaged, capsys):
    (damaged / "tokenizer.json").unlink()
    assert generate(damaged) == 2
    assert error(capsys).startswith(f"dsa generate: {damaged / 'tokenizer.json'}: no such file")


def test_an_unknown_model_type(damaged, capsys):
    config = json.loads((damaged / "config.json").read_bytes())
    replace(damaged / "config.json", json.dumps({**config, "model_type": "llama"}).encode())
    assert generate(damaged) == 2
    expected = f"dsa generate: {damaged / 'config.json'}: field 'model_type' is 'llama'; accepted: 'deepseek_v32', "
    assert error(capsys).startswith(expected)


def test_a_truncated_shard(damaged, capsys):
    shard = sorted(damaged.glob("*.safetensors"))[1]
    replace(shard, shard.read_bytes()[:-1000])
    assert generate(damaged) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    *_, summary, problem = captured.err.splitlines()
    assert summary == f"dsa generate: {damaged}: 1 problem, nothing was loaded:"
    assert problem.startswith(f"  {shard.name}: truncated: ")


def test_a_cache_that_is_too_large(checkpoint, capsys):
    assert generate(checkpoint, "--cache-tokens", 2**31) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line == "dsa generate: cache_tokens: must be at most 2147483520, got 2147483648"


@pytest.mark.parametrize("prompts", [(PROMPT,), (PROMPT, "a")])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_are_a_failure(damaged, capsys, prompts, temperature):
    """Of weights that hold a NaN: one line a sequence on the standard error, and the exit code of a failure."""
    from safetensors.torch import load_file, save_file

    for path in damaged.glob("*.safetensors"):
        tensors = load_file(path)
        if "model.norm.weight" in tensors:
            tensors["model.norm.weight"][3] = torch.nan
            path.unlink()
            save_file(tensors, path, metadata={"format": "pt"})
    assert generate(damaged, "--temperature", temperature, prompts=prompts) == 1
    captured = capsys.readouterr()
    lines = captured.err.splitlines()[-len(prompts) :]
    for i, line in enumerate(lines):
        assert re.fullmatch(
            rf"dsa generate: prompts\[{i}\]: its logits after \d+ tokens hold NaN or infinity: .*", line
        )
    assert "Traceback" not in captured.err
    assert captured.out == ("\n" if len(prompts) == 1 else "".join(f"[{p}]\n\n\n" for p in prompts))


def test_a_failure_is_no_wrong_call(checkpoint, monkeypatch, capsys):
    for raised, line in [(RuntimeError("CUDA error"), "CUDA error"), (MemoryError(), "out of memory")]:

        def stream(self, prompts, params, raised=raised):
            raise raised
            yield

        monkeypatch.setattr(Generator, "stream", stream)
        assert generate(checkpoint) == 1
        assert capsys.readouterr().err.splitlines()[-1] == f"dsa generate: {line}"


def test_a_cache_that_cannot_hold_the_prompt(checkpoint, capsys):
    assert generate(checkpoint, "--max-new-tokens", 200, "--cache-tokens", 128) == 2
    captured = capsys.readouterr()
    *_, line = captured.err.splitlines()
    assert captured.out == "" and re.fullmatch(
        r"dsa generate: prompts\[0\]: \d+ prompt tokens and 200 new ones need 4 pages of 64 tokens; the cache has 2 "
        r"\(cache_tokens\)",
        line,
    )


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([], "required: command"),
        (["train"], "invalid choice: 'train'"),
        (["generate", "x"], "required: --prompt"),
        (["tiny", "x", "--model", "llama"], "--model: invalid choice: 'llama'"),
        (["generate", "x", "--prompt", "y", "--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["generate", "x", "--prompt", "y", "--top-k", "many"], "--top-k: must be an integer, got 'many'"),
        (["generate", "x", "--prompt", "y", "--temperature", "hot"], "--temperature: invalid float value: 'hot'"),
        (["generate", "x", "--prompt", "y", "--kv-cache", "int4"], "--kv-cache: invalid choice: 'int4'"),
        (["generate", "", "--prompt", "y"], "checkpoint: must not be empty"),
        (["check", "more"], "unrecognized arguments: more"),
        (["bench"], "required: op"),
        (["tune", "x", "--jobs", "0"], "--jobs: must be at least 1, got 0"),
        (["tiny", ""], "directory: must not be empty"),
        (["tiny", "x", "--seed", "-1"], r"--seed: must be at least 0 and below 2^63, got -1"),
        (["tiny", "x", "--seed", "9" * 30], r"--seed: must be at least 0 and below 2^63, got 999"),
        (["tiny", "x", "--seed", "1.5"], "--seed: must be an integer, got '1.5'"),
    ],
)
def test_wrong_calls(capsys, arguments, shown):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2 and shown in error(capsys)


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0 and capsys.readouterr().out == f"dsa {dsa.__version__}\n"
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["version"] == dsa.__version__


def test_version_of_a_checkout_that_is_not_installed(monkeypatch, capsys):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"dsa {dsa.__version__}\n"


def test_control_c(checkpoint, monkeypatch, capsys):
    def stream(self, prompts, params):
        yield TokenEvent(0, 5, "begun", None)
        raise KeyboardInterrupt

    monkeypatch.setattr(Generator, "stream", stream)
    assert generate(checkpoint) == 130
    captured = capsys.readouterr()
    assert captured.out == "begun" and captured.err.endswith("\n") and "Traceback" not in captured.err


def test_warnings_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr(health, "check", lambda seeds: warnings.warn("mind this", stacklevel=1) or True)
    assert main(["check"]) == 0
    assert capsys.readouterr().err == "Warning: mind this\n"


def test_tiny(tmp_path, capsys):
    directory = tmp_path / "new" / "tiny"
    assert main(["tiny", str(directory), "--seed", "3"]) == 0
    assert capsys.readouterr().out == f"wrote {directory}\n"
    first = sorted(directory.glob("*.safetensors"))[0].read_bytes()
    assert main(["tiny", str(directory)]) == 0  # replaces its own
    assert sorted(directory.glob("*.safetensors"))[0].read_bytes() != first
    assert generate(directory) == 0


def test_tiny_refuses_a_directory_with_other_files(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert main(["tiny", str(tmp_path)]) == 2
    assert error(capsys).startswith(f"dsa tiny: {tmp_path}: holds 'thesis.tex', which is not part of a tiny checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_tiny_refuses_a_file(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["tiny", str(tmp_path / "file")]) == 2
    assert error(capsys) == f"dsa tiny: directory: must be a directory, got the file {tmp_path / 'file'}"
    assert main(["tiny", str(tmp_path / "file" / "within")]) == 2
    assert error(capsys) == f"dsa tiny: {tmp_path / 'file' / 'within'}: Not a directory"


def test_check(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(SELF_TESTS)
    assert lines[-1] == f"{len(SELF_TESTS)} of {len(SELF_TESTS)} ops passed"
