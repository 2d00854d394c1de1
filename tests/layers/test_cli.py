"""The `dsa` command, run in this process: what it prints, where, and with which exit code."""

import io
import json
import re
import sys
import warnings

import pytest
import torch

from dsa import backends
from dsa.self_test import SELF_TESTS
from dsa_bench import per_token_cast_to_fp8 as benchmark
from dsa_bench.harness import case
from dsa_layers import health
from dsa_layers.cli import main
from dsa_layers.generation import Generator, TokenEvent
from dsa_layers.models.loading import load_model
from dsa_layers.sampling import SamplingParams
from dsa_layers.tokenizer import Tokenizer

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

    monkeypatch.setattr("dsa_layers.models.loading.load_model", load)
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
        (("--device", "gpu"), "--device: must be cuda or cpu, got 'gpu'"),
        (("--device", "cuda:1"), "--device: got 'cuda:1', but torch sees no CUDA GPU"),
    ],
)
def test_wrong_options(checkpoint, monkeypatch, capsys, options, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert generate(checkpoint, *options) == 2
    assert error(capsys) == f"dsa generate: {expected}"


@pytest.mark.parametrize("option", ["--max-new-tokens", "--cache-tokens", "--prefill-chunk"])
def test_sizes_are_positive(checkpoint, capsys, option):
    with pytest.raises(SystemExit, match="2"):
        generate(checkpoint, option, "0")
    assert f"argument {option}: must be at least 1, got 0" in capsys.readouterr().err


def test_a_missing_directory(tmp_path, capsys):
    assert generate(tmp_path / "nowhere") == 2
    assert error(capsys).startswith(f"dsa generate: {tmp_path / 'nowhere'}: no such directory")


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
        (["generate", "x", "--prompt", "y", "--top-k", "many"], "--top-k: invalid int value: 'many'"),
    ],
)
def test_wrong_calls(capsys, arguments, shown):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2 and shown in capsys.readouterr().err


def test_control_c(checkpoint, monkeypatch, capsys):
    def stream(self, prompts, params):
        yield TokenEvent(0, 5, "begun", None)
        raise KeyboardInterrupt

    monkeypatch.setattr(Generator, "stream", stream)
    assert generate(checkpoint) == 130
    captured = capsys.readouterr()
    assert captured.out == "begun" and captured.err.endswith("\n") and "Traceback" not in captured.err


def test_warnings_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr(health, "check", lambda: warnings.warn("mind this", stacklevel=1) or True)
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


def test_check(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(SELF_TESTS)
    assert lines[-1] == f"{len(SELF_TESTS)} of {len(SELF_TESTS)} ops passed"


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_bench_and_tune_name_the_ops(command, capsys):
    for name in ("nonsense", "harness"):
        assert main([command, name]) == 2
        refusal, _, ops = error(capsys).partition("; there are: ")
        assert refusal == f"dsa {command}: no benchmark for '{name}'"
        assert "per_token_cast_to_fp8" in ops.split(", ") and "harness" not in ops.split(", ")


@pytest.mark.parametrize(("command", "what"), [("bench", "a benchmark"), ("tune", "tuning")])
def test_bench_and_tune_need_a_gpu(command, what, monkeypatch, capsys):
    monkeypatch.setattr(backends, "why_no_kernels", lambda: "torch sees no CUDA GPU")
    assert main([command, "per_token_cast_to_fp8"]) == 2
    assert error(capsys) == f"dsa {command}: {what} needs a Hopper GPU: torch sees no CUDA GPU"


def test_tune_needs_an_op_with_configurations(monkeypatch, capsys):
    monkeypatch.setattr(backends, "why_no_kernels", lambda: None)
    assert main(["tune", "indexer_cache"]) == 2
    assert error(capsys) == "dsa tune: indexer_cache: its benchmark has no tuning()"


def test_bench_prints_a_table_and_writes_and_draws_it(monkeypatch, tmp_path, capsys):
    times = iter([{"dsa": 0.5, "vllm": 0.75, "sglang": 1.0}, {"dsa": 0.25}])
    monkeypatch.setattr(backends, "why_no_kernels", lambda: None)
    monkeypatch.setattr(case, "bench", lambda calls, **options: next(times))
    monkeypatch.setattr(benchmark, "SHAPES", [(8,), (9,)])
    monkeypatch.setattr(benchmark, "case", lambda n: case.Case(f"{n} x 128", {}, lambda ms: f"{1 / ms:.0f} GB/s"))
    files = ["--csv", str(tmp_path / "rows.csv"), "--png", str(tmp_path / "rows.png")]
    assert main(["bench", "per_token_cast_to_fp8", *files]) == 0
    shown = capsys.readouterr().out
    assert re.search(
        r"8 x 128 +0\.5000 ms +2 GB/s +vllm 0\.7500 ms, ratio 1\.50; sglang 1\.0000 ms, ratio 2\.00", shown
    )
    assert re.search(r"9 x 128 +0\.2500 ms +4 GB/s +no peer", shown)
    header, *written = (tmp_path / "rows.csv").read_text().splitlines()
    assert header == "shape,ms,figure,vllm ms,vllm ratio,sglang ms,sglang ratio"
    assert written == ["8 x 128,0.5,2 GB/s,0.75,1.5,1.0,2.0", "9 x 128,0.25,4 GB/s,,,,"]
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
