"""The command `python -m dsa_bench.e2e`: rejected calls, printed lines, and compiled kernels."""

import json

import pytest

from dsa_bench.e2e import __main__ as whole
from dsa_bench.e2e import against_transformers, drafts, latency, million
from dsa_bench.e2e import command as shared
from dsa_bench.e2e.stacks import skeleton
from dsa_layers.command.main import main
from tests.bench.small_stacks import FEWER, SMALL

ROWS = [{"shape": "a"}, {"shape": "b", "ms": 1.5}]
NO_GPU = "a benchmark needs a GPU with kernels: no GPU"


@pytest.mark.parametrize(
    ("arguments", "reason", "message"),
    [
        (["parallel", "--gpus", "1"], None, "--gpus: must be at least 2 and at most the 2 that torch sees, got 1"),
        (["parallel", "--gpus", "4"], None, "--gpus: must be at least 2 and at most the 2 that torch sees, got 4"),
        (["parallel", "--models", "V5"], "no GPU", "argument --models: invalid choice: 'V5'"),
        (["parallel", "--runs", "prefill 5"], "no GPU", "argument --runs: invalid choice: 'prefill 5'"),
        *(([name], "no GPU", NO_GPU) for name in shared.NAMES),
        (["against_transformers"], None, "the benchmark needs transformers: pip install transformers"),
        (["against_transformers", "--layers", "0"], None, "argument --layers: must be at least 1, got 0"),
        (["against_transformers", "--tokens", "8", "x"], None, "argument --tokens: invalid integer value: 'x'"),
        (["e2e"], None, "argument NAME: invalid choice: 'e2e'"),
    ],
)
def test_wrong_calls_say_what_is_wrong(arguments, reason, message, capsys, monkeypatch):
    monkeypatch.setattr("dsa.runtime.backends.why_no_kernels", lambda: reason)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(against_transformers, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        whole.main(arguments)
    assert message in capsys.readouterr().err


def test_bench_e2e_needs_a_gpu_and_has_no_profile(capsys):
    assert main(["bench", "e2e"]) == 2 and "needs a GPU with kernels" in capsys.readouterr().err
    assert main(["bench", "e2e", "--profile"]) == 2 and "--profile: is for one op" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "others"),
    [
        *((name, {}) for name in ("drafts", "latency", "million")),
        ("parallel", {"gpus": 2, "one": False, "runs": None, "layers": None, "done": []}),
    ],
)
def test_a_command_prints_a_line_per_row_or_only_compiles(name, others, capsys, monkeypatch, gpu):
    calls, asked = [], []
    monkeypatch.setattr(shared, "compile_ahead", lambda asked, tell: asked() or tell("compiled"))
    monkeypatch.setattr(shared.load(name), "asked", lambda **options: asked.append(options))
    monkeypatch.setattr(shared.load(name), "rows", lambda *, tell, **options: calls.append(options) or iter(ROWS))
    assert whole.main([name, "--models", "V4-Flash"]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == ROWS and "compiled" in err
    assert calls == asked == [{"models": ["V4-Flash"]} | others]
    assert whole.main([name, "--compile"]) == 0 and len(calls) == 1 and len(asked) == 2


@pytest.mark.slow
def test_kernels_that_are_asked_for(monkeypatch):
    monkeypatch.setattr(latency, "skeleton", lambda name: skeleton(name, **SMALL, **FEWER[name]))
    decoding = {"compile_fp8_paged_mqa_logits", "compile_route_to_experts"}
    prompts = {"compile_sparse_mla_fp8_kv", "compile_sparse_mla_cast", "compile_fp8_mqa_logits", "compile_topk_indices"}
    for asked, expected in (
        (drafts.asked(["V3.2"], [4]), decoding),
        (million.asked(lengths=[2**19], sequences=[4]), decoding | prompts | {"compile_sparse_mla"}),
        (latency.asked(["V4-Flash"], [512], latency.Sizes(prompt=4096)), {"compile_fp8_mqa_logits"}),
    ):
        assert expected <= {variant.function for variant in asked}
