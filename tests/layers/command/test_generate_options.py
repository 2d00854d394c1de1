"""`dsa generate`'s options: their defaults, where prompts come from, and what wrong ones are told."""

import io
import json
import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from dsa_layers import SHIPPED_MODEL, Tokenizer
from dsa_layers.command.main import _parser, main
from dsa_layers.command.prompt_sources import Prompt, read_prompts
from dsa_layers.generation.generator import Generator
from dsa_layers.io.directory import SINGLE_NAME
from tests.layers.command.calls import PROMPT, generate, replace

EOS = "<｜end▁of▁sentence｜>"


@pytest.fixture
def given(monkeypatch):
    """The prompts, as token ids, and the parameters that reach the generator, which then gives nothing."""
    calls = []
    monkeypatch.setattr(Generator, "stream", lambda self, prompts, params: iter_of(calls.append((prompts, params))))
    return calls


def iter_of(_):
    yield from ()


@pytest.fixture
def loaded(monkeypatch):
    """The options that reach `load_model`, which then refuses."""
    calls = []

    def load(directory, **options):
        calls.append(options)
        raise ValueError("not loaded")

    monkeypatch.setattr("dsa_layers.io.loading.load_model", load)
    return calls


def shipped(*options):
    return main(["generate", "--device", "cpu", "--cache-tokens", "512", *options])


def test_options_win_over_what_the_checkpoint_says(given):
    written = json.loads((SHIPPED_MODEL / "generation_config.json").read_text())
    assert written["do_sample"] and 0 < written["temperature"] < 1 and written["top_p"] < 1
    sampled = ["--temperature", "2", "--top-p", "1", "--top-k", "7", "--seed", "3", "--stop", "a", "--stop", "b"]
    for options in ([], ["--temperature", "0"], sampled):
        assert shipped("--prompt", "x", *options) == 0
    (_, default), (_, greedy), (_, own) = given
    assert (default.temperature, default.top_p, default.top_k) == (written["temperature"], written["top_p"], 0)
    assert greedy.temperature == 0
    assert (own.temperature, own.top_p, own.top_k, own.seed, own.stop) == (2, 1, 7, 3, ("a", "b"))


def test_vllms_parameters_reach_the_generator_and_what_is_wrong_goes_by_the_option(given, capsys):
    options = "--min-p 0.1 --repetition-penalty 1.2 --presence-penalty 0.5 --frequency-penalty -1 --n 3".split()
    assert shipped("--prompt", "x", *options, "--logprobs", "2", "--json") == 0
    ((_, own),) = given
    assert (own.n, own.min_p, own.repetition_penalty, own.logprobs) == (3, 0.1, 1.2, 2)
    assert (own.presence_penalty, own.frequency_penalty) == (0.5, -1)
    for option, value in (("--min-p", "2"), ("--presence-penalty", "3"), ("--repetition-penalty", "0")):
        assert shipped("--prompt", "x", option, value) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(f"dsa generate: {option}: must be ")


def test_a_checkpoint_that_says_nothing_is_greedy(given, damaged):
    (damaged / "generation_config.json").unlink()
    assert main(["generate", str(damaged), "--device", "cpu", "--cache-tokens", "512", "--prompt", "x"]) == 0
    ((_, params),) = given
    assert (params.temperature, params.top_p, params.top_k) == (0, 1, 0)


def test_weights_are_dequantised_on_a_cpu_alone(loaded, monkeypatch, checkpoint):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 10**9))
    monkeypatch.setattr("dsa.runtime.backends.why_no_kernels", lambda: "no GPU for this test")
    for device in ([], ["--device", "cpu"]):
        for option in ([], ["--dequantize"], ["--no-dequantize"]):
            assert main(["generate", str(checkpoint), "--prompt", "x", *device, *option]) == 2
    on_gpu, on_cpu = zip(["cuda"] * 3, (False, True, False)), zip(["cpu"] * 3, (True, True, False))
    assert [(options["device"], options["dequantize"]) for options in loaded] == [*on_gpu, *on_cpu]


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ([], {}),
        (["--dtype", "float32", "--kv-cache", "fp8"], {"dtype": torch.float32, "kv_cache": "fp8"}),
        (["--widen-experts", "--draft", "3"], {"widen_experts": True, "drafter": True}),
    ],
)
def test_options_reach_the_model(checkpoint, loaded, monkeypatch, options, changes):
    wanted = {"device": "cpu", "dtype": None, "dequantize": True, "kv_cache": None, "widen_experts": False}
    wanted |= {"mesh": None, "drafter": False, "progress": False} | changes
    assert generate(checkpoint, *options) == 2
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    stream.isatty = lambda: True
    assert generate(checkpoint, *options) == 2
    assert loaded == [wanted, wanted | {"progress": True}]  # a bar is for terminals


def test_threads(loaded, monkeypatch, checkpoint):
    """One for the shipped model, unless somebody asks for another number; others have PyTorch's."""
    asked = []
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert shipped("--prompt", "x") == shipped("--prompt", "x", "--threads", "12") == generate(checkpoint) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert shipped("--prompt", "x") == 2
    assert asked == [1, 12]


@pytest.mark.parametrize(
    ("backend", "problem"),
    [
        ("foo", "must be one of cute, reference, got 'foo'"),
        ("cute", "must be reference where kernels cannot run, got 'cute', but the model is on cpu"),
    ],
)
def test_backends_that_the_ops_would_refuse(monkeypatch, error, backend, problem):
    """Before the prompt is shown."""
    monkeypatch.setenv("DSA_BACKEND", backend)
    assert shipped("--prompt", "x") == 2
    assert error() == f"dsa generate: DSA_BACKEND: {problem}"


def read_by_the_generator(given):
    """The prompts' texts, behind the token that begins a text."""
    tokenizer = Tokenizer(SHIPPED_MODEL)
    return [tokenizer.decode(ids[1:]) for ids in given[-1][0]]


def test_prompts_come_from_arguments_files_and_the_standard_input(given, tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes("né\n\n".encode())
    (tmp_path / "b").write_bytes(b"last\r\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"piped\nlines\n")))
    files = [["--prompt-file", str(tmp_path / name)] for name in "ab"]
    assert shipped("--prompt", "first", *files[0], "--prompt", "-", "--prompt", "x\n", *files[1]) == 0
    assert read_by_the_generator(given) == ["first", "né\n", "piped\nlines", "x\n", "last"]


@pytest.mark.parametrize("content", [None, b"hello", b"\xff", b"[1]", b'{"text": "x"}'])
def test_a_copy_that_no_dsa_wrote(tmp_path, error, content):
    path = tmp_path / "copy"
    if content is not None:
        path.write_bytes(content)
    assert shipped("--prompt-copy", str(path)) == 2
    assert error() == f"dsa generate: --prompt-copy: must be a file that dsa wrote for its ranks, got {path}"


def test_drafts_of_an_id_whose_file_is_a_link_to_nothing(checkpoint, tmp_path, monkeypatch):
    """It is fetched by the ranks."""
    (tmp_path / "config.json").symlink_to(checkpoint / "config.json")
    (tmp_path / SINGLE_NAME).symlink_to(tmp_path / "blob")
    monkeypatch.setattr("dsa_layers.io.hub.checkpoint_directory", lambda name, weights: tmp_path)
    monkeypatch.setattr("dsa_layers.parallel.launch.launch", lambda *_: 0)
    assert generate("owner/name", "--draft", "1", "--gpus", "2") == 0


@pytest.mark.parametrize("started", [None, 2])
def test_several_gpus_where_there_is_none(checkpoint, monkeypatch, error, started):
    """Whether this command would start the ranks or is one of torchrun's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("dsa_layers.command.on_gpus.started_ranks", lambda: started)
    monkeypatch.setattr("dsa_layers.parallel.launch.launch", lambda *_: 0)
    monkeypatch.setattr("dsa_layers.parallel.process_group.join", None)
    call = ["generate", str(checkpoint), "--prompt", "x"]
    assert main(call + (["--gpus", "2"] if started is None else [])) == 2
    told = "--gpus: got 2, but torch sees no CUDA GPU; for processes of a CPU give --device cpu"
    assert error() == f"dsa generate: {told}"


def test_weights_that_are_dequantised_because_there_is_no_gpu(checkpoint, loaded, damaged, monkeypatch, capsys):
    """It is said before they are, but not where somebody has asked for it, or they are not quantised."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = json.loads((damaged / "config.json").read_bytes())
    del config["quantization_config"]
    replace(damaged / "config.json", json.dumps(config).encode())
    quantised = ["generate", str(checkpoint), "--prompt", "x"]
    unquantised = ["generate", str(damaged), "--prompt", "x"]
    told = "No GPU: the model runs on the CPU, and its quantised weights are dequantised, which takes more memory."
    for call, lines in [
        (quantised, [told]),
        ([*quantised, "--json"], [told]),
        ([*quantised, "--device", "cpu"], []),
        ([*quantised, "--dequantize"], []),
        ([*quantised, "--no-dequantize"], []),
        (unquantised, []),
        (["generate", "--prompt", "x"], []),
    ]:
        assert main(call) == 2
        captured = capsys.readouterr()
        assert captured.err.splitlines() == [*lines, "dsa generate: not loaded"], call
        assert told not in captured.out


def test_more_tokens_than_the_context_leaves(given, checkpoint, capsys):
    context = json.loads((SHIPPED_MODEL / "config.json").read_bytes())["max_position_embeddings"]
    for prompts, which in ((["a"], "prompt"), (["a", "a b c d"], "longest prompt")):
        asked = [part for prompt in prompts for part in ("--prompt", prompt)]
        assert shipped(*asked, "--max-tokens", "60000") == 0
        left = context - max(map(len, given[-1][0]))
        line, _ = capsys.readouterr().err.splitlines()
        told = f"leaves {left} after the {which}, got 60000"
        assert line == f"--max-tokens: the model's context of {context} tokens {told}"
    assert shipped("--prompt", "a", "--max-tokens", str(context - len(given[-2][0][0]))) == 0
    (_,) = capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("joined", [False, True])
def test_prompt_files_reach_ranks(checkpoint, tmp_path, monkeypatch, joined):
    """Also those that ranks do not have, as of <(command) and 3<file; under the names that they were given by."""
    seen = []

    def launch(command, ranks, told):
        args = _parser().parse_args(command[3:])
        seen.extend(read_prompts([source for source in args.prompts if source != ("--prompt", "-")]))

    monkeypatch.setattr("dsa_layers.parallel.launch.launch", launch)
    (tmp_path / "a").write_text("a file")
    descriptor = os.open(tmp_path / "a", os.O_RDONLY)
    files = {str(tmp_path / "a"): "a file", f"/dev/fd/{descriptor}": "a file"}
    for text, read in ((b"def f(\n", "def f("), (b"two lines\r\n\n", "two lines\r\n")):
        end, start = os.pipe()
        os.write(start, text)
        os.close(start)
        files[f"/dev/fd/{end}"] = read
    call = ["generate", str(checkpoint), "--device", "cpu", "--gpus", "2", "--prompt", "-"]
    for file in files:
        call += [f"--prompt-file={file}"] if joined else ["--prompt-file", file]
    main(call)
    os.close(descriptor)
    assert seen == [Prompt(f"--prompt-file {file}", text) for file, text in files.items()]


def test_a_prompt_in_utf8_under_another_locale(given):
    """Its bytes come as surrogates."""
    assert shipped("--prompt", "d\udcc3\udca9f") == 0
    assert read_by_the_generator(given) == ["déf"]


def test_prompts_that_cannot_be_read(tmp_path, monkeypatch, error):
    (tmp_path / "empty").touch()
    (tmp_path / "newline").write_text("\n")
    (tmp_path / "binary").write_bytes(b"ab\xff")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xfe")))
    accepted = "accepted: --prompt TEXT, --prompt -, --prompt-file FILE"
    for options, problem in [
        ([], f"--prompt: must be given, got none; {accepted}"),
        (["--prompt", "-"], r"--prompt -: must be UTF-8, got b'\xfe'"),
        (["--prompt", "-"], "--prompt -: must not be empty, got no text"),  # it has been read
        (["--prompt", "x", "--prompt", ""], "--prompt (prompt 2 of 2): must not be empty, got no text"),
        (
            ["--prompt", "-", "--prompt", "-"],
            "--prompt: - must come once, as the standard input is read once, got it 2 times",
        ),
        (["--prompt-file", tmp_path / "empty"], f"--prompt-file {tmp_path}/empty: must not be empty, got no text"),
        (["--prompt-file", tmp_path / "newline"], f"--prompt-file {tmp_path}/newline: must not be empty, got no text"),
        (["--prompt-file", tmp_path / "binary"], rf"--prompt-file {tmp_path}/binary: must be UTF-8, got b'\xff'"),
        (
            ["--prompt-file", tmp_path / "none"],
            f"--prompt-file: must be a readable file, got {tmp_path}/none: No such file or directory",
        ),
        (["--prompt-file", tmp_path], f"--prompt-file: must be a readable file, got {tmp_path}: Is a directory"),
    ]:
        assert shipped(*map(str, options)) == 2
        assert error() == f"dsa generate: {problem}"
    monkeypatch.setattr(sys, "stdin", None)
    assert shipped("--prompt", "-") == 2
    assert error() == "dsa generate: --prompt -: must have a standard input to read, got a closed one"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--prompt", ""), "--prompt (prompt 2 of 2): must not be empty, got no text"),
        (("--stop", "\udcff"), r"--stop: must be UTF-8, got b'\xff'"),
        (("--prompt", "ab\udcc3("), r"--prompt (prompt 2 of 2): must be UTF-8, got b'\xc3'"),
        (("--prompt", "a\ud800"), r"--prompt (prompt 2 of 2): must be UTF-8, got 'a\ud800'"),
        (("--stop", "a", "--stop", EOS), f"--stop: must not be a special token, which no text shows, got {EOS!r}"),
        (("--device", "gpu"), "--device: must be cpu, cuda or cuda:N, got 'gpu'"),
        (("--device", "tpu"), "--device: must be cpu, cuda or cuda:N, got 'tpu'"),
        (("--device", "cpu:2"), "--device: must be cpu, cuda or cuda:N, got 'cpu:2'"),
        (("--device", ""), "--device: must be cpu, cuda or cuda:N, got ''"),
        (("--device", "cuda:1"), "--device: got 'cuda:1', but torch sees no CUDA GPU"),
        (("--cache-tokens", 2**31), "--cache-tokens: must be at most 2147483520, got 2147483648"),
    ],
)
def test_wrong_options(checkpoint, monkeypatch, error, options, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert generate(checkpoint, *options) == 2
    assert error() == f"dsa generate: {expected}"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--top-p", "1.5"), "--top-p: must be above 0 and at most 1, got 1.5"),
        (("--top-p", "nan"), "--top-p: must be above 0 and at most 1, got nan"),
        (("--temperature", "-1"), "--temperature: must be a finite number of at least 0, got -1.0"),
        (("--temperature", "inf"), "--temperature: must be a finite number of at least 0, got inf"),
        (("--top-k", "-1"), "--top-k: must be at least 0, got -1"),
        (("--seed", "-1"), "--seed: must be at least 0 and below 2^63, got -1"),
        (("--seed", "9" * 30), f"--seed: must be at least 0 and below 2^63, got {'9' * 30}"),
        (("--stop", ""), "--stop: must not be empty, got ''"),
        (("--threads", "13"), "--threads: must be at most 12, 4 for each of 3 CPUs, got 13"),
        (("--threads", "100000"), "--threads: must be at most 12, 4 for each of 3 CPUs, got 100000"),
    ]
    + [
        ((option, value), f"{option}: {problem}")
        for option in ("--max-tokens", "--cache-tokens", "--prefill-chunk", "--threads")
        for value, problem in [
            ("0", "must be at least 1, got 0"),
            ("-5", "must be at least 1, got -5"),
            ("1e3", "must be an integer, got '1e3'"),
            ("9" * 5000, f"must be an integer, got '{'9' * 60}'"),
        ]
    ],
)
def test_options_that_the_parser_refuses(checkpoint, monkeypatch, error, options, expected):
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert generate(checkpoint, *options) == 2
    assert error() == f"dsa generate: argument {expected} (see dsa generate --help)"


def test_a_missing_directory(tmp_path, error):
    (tmp_path / "file").touch()
    for name in ("nowhere", "file/within"):
        assert generate(tmp_path / name) == 2
        assert error().startswith(f"dsa generate: {tmp_path / name}: no such directory")
    assert generate(tmp_path / "file") == 2
    told = "is a file; a checkpoint is the directory of config.json and safetensors"
    assert error() == f"dsa generate: {tmp_path / 'file'}: {told}"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    assert generate(tmp_path / "other") == 2
    told = "config.json: no such file; a checkpoint directory holds a config.json"
    assert error() == f"dsa generate: {tmp_path / 'other'}/{told}"
    assert generate("a" * 300) == 2
    assert error() == f"dsa generate: {'a' * 300}: File name too long"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer.json", None, "no such file"),
        ("generation_config.json", b'{"top_p": 2}', "field top_p: must be above 0 and at most 1, got 2.0"),
        ("config.json", b'{"model_type": "llama"}', "field 'model_type' is 'llama'; accepted: 'deepseek_v32', "),
    ],
)
def test_files_that_are_wrong(damaged, error, name, content, problem):
    (damaged / name).unlink()
    if content is not None:
        (damaged / name).write_bytes(content)
    assert generate(damaged) == 2
    assert error().startswith(f"dsa generate: {damaged / name}: {problem}")


def test_a_truncated_shard(damaged, capsys):
    shard = sorted(damaged.glob("*.safetensors"))[1]
    replace(shard, shard.read_bytes()[:-1000])
    assert generate(damaged) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    *_, summary, problem = captured.err.splitlines()
    assert summary == f"dsa generate: {damaged}: 1 problem, nothing was loaded:"
    assert problem.startswith(f"  {shard.name}: not a safetensors file, or cut short at ")


def test_a_cache_that_cannot_hold_a_prompt(checkpoint, tmp_path, error):
    """The message names the option that the prompt comes from, and the file as it is called."""
    file = tmp_path / "cache_tokens"
    file.write_text(PROMPT)
    for options, prompts, source in [
        ((), (PROMPT,), "--prompt"),
        (("--prompt-file", file), (), f"--prompt-file {file}"),
        ((), ("x", PROMPT), r"--prompt \(prompt 1 of 2\)"),
    ]:
        assert generate(checkpoint, "--max-tokens", 200, "--cache-tokens", 128, *options, prompts=prompts) == 2
        assert re.fullmatch(
            rf"dsa generate: {source}: \d+ prompt tokens and 200 new ones need 4 pages of 64 tokens; the cache has 2 "
            r"\(--cache-tokens\)",
            error(),
        )
