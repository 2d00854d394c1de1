"""`dsa compile`: what it asks for is in tests/layers/compilation; here are its options, output and errors."""

import importlib.util
import json
import re
from dataclasses import replace

import pytest

from dsa.runtime.variants import Variant
from dsa_layers.command.main import main
from dsa_layers.compilation import variants
from dsa_layers.engine.split import DoesNotDivide
from dsa_layers.models.family import VENDORED

SORT = "dsa.kernels.moe.sort_by_expert_sm90"
FLASH = VENDORED / "deepseek_v4_flash_config.json"


@pytest.fixture
def asked(monkeypatch):
    """(configuration, precisions, drafts, GPUs) that the command looks for the kernels of; one compiles in a second."""
    found = []

    def model_variants(config, precisions, *, drafts, gpus=1):
        if gpus == 8:
            raise DoesNotDivide("gpus: 8 do not evenly share the 4 experts of it")
        found.append((config, list(precisions), drafts, gpus))
        return [Variant(SORT, "compile_sort_by_expert", ("int64",))]

    monkeypatch.setattr(variants, "model_variants", model_variants)
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
    config, (precision,), *numbers = asked[0]
    assert config.model_type == "deepseek_v32" and precision.fp8_linear and precision.kv_cache == "fp8"
    assert numbers == [0, 1]


@pytest.mark.slow
def test_options_choose_the_variants(asked, tmp_path, monkeypatch):
    """A config.json by itself, whatever its name; a share of the heads; what `dsa generate` can be told."""
    monkeypatch.setenv("DSA_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    assert main(["compile", "--model", str(FLASH), "--heads", "16", "--widen-experts", "--jobs", "1"]) == 0
    options = ["--dequantize", "--dtype", "float16", "--draft", "2", "--jobs", "1"]
    assert main(["compile", "--model", str(FLASH), *options]) == 0
    (first, (one,), *numbers), part, (second, (other,), *others) = asked
    assert numbers == [0, 1] and others == [2, 1]
    # An engine's share of the heads, and a rank's part of the model.
    assert part == (replace(first, num_attention_heads=64, o_groups=8), [one], 0, 4)
    assert (first.num_attention_heads, first.o_groups, one.fp4_experts, one.fp8_linear) == (16, 2, False, True)
    assert (second.num_attention_heads, str(other.dtype), other.fp8_linear) == (64, "torch.float16", False)
    assert list(tmp_path.glob("*.o"))


def test_a_share_of_the_heads_is_compiled_although_no_rank_has_it(asked, tmp_path, capsys):
    assert main(["compile", "--model", str(FLASH), "--heads", "8", "--out", str(tmp_path / "new"), "--jobs", "1"]) == 0
    assert [(config.num_attention_heads, gpus) for config, _, _, gpus in asked] == [(8, 1)]
    note = "Note: none for dsa generate --gpus 8: gpus: 8 do not evenly share the 4 experts of it\n"
    captured = capsys.readouterr()
    assert note in captured.err and "1 kernels compiled" in captured.out


def test_errors(asked, checkpoint, tmp_path, monkeypatch, error):
    changed = tmp_path / "config.json"
    changed.write_text(json.dumps(json.loads((checkpoint / "config.json").read_text()) | {"model_type": "gpt2"}))
    writable = tmp_path / "writable"
    writable.mkdir()
    writable.chmod(0o777)
    model = ["--model", str(checkpoint)]
    for options, message in (
        (["--model", str(tmp_path / "nowhere")], f"{tmp_path}/nowhere/config.json: no such file"),
        (["--model", str(changed)], f"{changed}: field 'model_type' is 'gpt2'; accepted: "),
        ([*model, "--heads", "3"], "--heads: must be a GPU's share of 4 heads, one of [1, 2, 4], got 3"),
        ([*model, "--out", str(writable)], f"--out: {writable} cannot be used: other users may write to the folder"),
        ([*model, "--out", str(changed)], f"--out: {changed} cannot be used: "),
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


def test_drafts_of_a_model_without_a_drafter_are_refused(checkpoint, tmp_path, capsys):
    fields = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"num_nextn_predict_layers": 0}))
    assert main(["compile", "--model", str(tmp_path), "--out", str(tmp_path / "new"), "--draft", "1"]) == 2
    told = "dsa compile: --draft: config.json has num_nextn_predict_layers=0"
    assert re.search(f"^{told}", capsys.readouterr().err, re.M)
