"""Tests of `dsa compile`: options, output and errors."""

import importlib.util
import json

import pytest
import torch

from dsa.runtime.variants import Variant
from dsa_layers import compilation
from dsa_layers.command.main import main
from dsa_layers.models.family import VENDORED
from tests.layers.io.stand_ins import BF16, fields_of

SORT = "dsa.kernels.moe.sort_by_expert_sm90"
FLASH = VENDORED / "deepseek_v4_flash_config.json"


@pytest.fixture
def asked(monkeypatch):
    """Make the command compile one kernel. Return the growing list of (configuration, precision, drafts, GPUs)."""
    found = []

    def model_variants(config, precision, *, drafts, gpus):
        found.append((config, precision, drafts, gpus))
        return [Variant(SORT, "compile_sort_by_expert", ("int64",))]

    monkeypatch.setattr(compilation, "model_variants", model_variants)
    return found


@pytest.mark.slow
def test_a_checkpoints_kernels_are_compiled_once(asked, checkpoint, tmp_path, capsys):
    out = tmp_path / "new" / "kernels"
    for outcome in ("1 kernels compiled, 0 were there", "0 kernels compiled, 1 were there"):
        assert main(["compile", "--model", str(checkpoint), "--out", str(out), "--jobs", "1"]) == 0
        captured = capsys.readouterr()
        assert captured.out == f"{out}: {outcome}\n"
        assert captured.err.startswith(f"{checkpoint}: looking for what its passes ask for\n")
    assert [path.name.partition("-")[0] for path in out.glob("*.o")] == ["sort_by_expert"]
    config, precision, *numbers = asked[0]
    assert config.model_type == "deepseek_v32" and precision.fp8_linear and precision.kv_cache == "fp8"
    assert numbers == [0, 1]


@pytest.mark.slow
def test_options_choose_the_variants(asked, tmp_path, monkeypatch):
    monkeypatch.setenv("DSA_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    for options in ("--gpus 4", "--widen-experts", "--dequantize --dtype float16 --draft 2"):
        assert main(["compile", "--model", str(FLASH), "--jobs", "1", *options.split()]) == 0
    found = [(one.fp4_experts, one.fp8_linear, one.dtype, *numbers) for _, one, *numbers in asked]
    assert found == [(True, True, BF16, 0, 4), (False, True, BF16, 0, 1), (False, False, torch.float16, 2, 1)]
    assert list(tmp_path.glob("*.o"))


def test_wrong_calls_are_named_before_any_work(asked, checkpoint, tmp_path, monkeypatch, error):
    changed = tmp_path / "config.json"
    changed.write_text(json.dumps(fields_of(checkpoint) | {"model_type": "gpt2"}))
    writable = tmp_path / "writable"
    writable.mkdir()
    writable.chmod(0o777)
    model = ["--model", str(checkpoint)]
    for options, message in (
        (["--model", str(tmp_path / "nowhere")], f"{tmp_path}/nowhere: no such directory; accepted: "),
        (["--model", str(changed)], f"{changed}: field 'model_type' is 'gpt2'; accepted: "),
        ([*model, "--out", str(writable)], "other users may write to the folder"),
        ([*model, "--out", str(changed)], f"{changed} is not a folder"),
    ):
        assert main(["compile", *options]) == 2
        assert error().startswith(f"dsa compile: {message}"), message
    monkeypatch.setenv("DSA_CACHE_DIR", "")
    assert main(["compile", *model]) == 2
    assert error() == "dsa compile: --out: must be given if DSA_CACHE_DIR is empty"
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cutlass" else find_spec(name))
    assert main(["compile", *model]) == 2
    assert error().startswith("dsa compile: nvidia-cutlass-dsl is not installed")
    assert not asked


def test_models_that_lack_a_drafter_or_do_not_come_apart_are_refused(checkpoint, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(fields_of(checkpoint) | {"num_nextn_predict_layers": 0}))
    for option, n, problem in (("--draft", "1", "config.json must have"), ("--gpus", "3", "3 do not evenly share")):
        assert main(["compile", "--model", str(tmp_path), "--out", str(tmp_path / "new"), option, n]) == 2
        assert f"\ndsa compile: {option}: {problem}" in capsys.readouterr().err
