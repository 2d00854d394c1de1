"""What each GPU would hold, beside what ranks do hold, and `dsa plan`."""

from pathlib import Path

import pytest
import torch

import dsa_layers
from dsa_layers import load_model
from dsa_layers.checkpoint.gpu_plan import STATE_SLOTS, check_fits, plan, plans, precision_of
from dsa_layers.command.main import main
from dsa_layers.families.config import read_config
from dsa_layers.families.registry import model_types
from dsa_layers.parallel.ranks import Ranks
from dsa_layers.tiny import write_tiny_checkpoint

VENDORED = Path(dsa_layers.__file__).parent / "vendored"


@pytest.mark.parametrize("model", model_types())
def test_it_is_what_a_rank_holds(model, tmp_path):
    write_tiny_checkpoint(tmp_path, model=model)
    config = read_config(tmp_path)
    for gpus in (1, 2):
        found = plan(config, precision_of(config), gpus)
        part = load_model(tmp_path, mesh=Ranks(gpus - 1, gpus), progress=False)
        assert found.weights == sum(tensor.nbytes for tensor in part.state_dict().values())
        cache = part.make_cache(10, part.page_size, state_slots=STATE_SLOTS)
        assert found.bytes(10 * part.page_size) == found.weights + cache.nbytes == found.bytes(9 * part.page_size + 1)
        assert found.whole == plan(config, precision_of(config), 1).weights


def test_context_is_what_is_left():
    config = read_config(VENDORED / "deepseek_v32_config.json")
    found = plan(config, precision_of(config), 8)
    memory = 141 * 10**9
    tokens = found.tokens(memory)
    assert found.bytes(tokens) <= 0.9 * memory < found.bytes(tokens + found.page_size)
    assert found.tokens(80 * 10**9) == 0


def test_published_models():
    """By the numbers of the published files: 671 GB of DeepSeek-V3.2, 155 GB of DeepSeek-V4-Flash with FP4 experts.
    What every GPU has whole is a tenth at most."""
    sizes = {}
    for name in ("deepseek_v32", "deepseek_v4_flash"):
        config = read_config(VENDORED / f"{name}_config.json")
        found = plans(config, precision_of(config), 16)
        sizes[name] = found[0].whole / 1e9
        assert [one.gpus for one in found] == ([1, 2, 4, 8, 16] if name == "deepseek_v32" else [1, 2, 4, 8])
        assert all(one.weights < 1.1 * one.whole / one.gpus for one in found[:4])
    assert 655 < sizes["deepseek_v32"] < 690 and 150 < sizes["deepseek_v4_flash"] < 160


def test_the_command(capsys):
    flash = str(VENDORED / "deepseek_v4_flash_config.json")
    assert main(["plan", flash, "--memory", "141"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "156.1 GB of weights" in lines[0] and "GPUs of 141 GB" in lines[0]
    assert [line.split()[0] for line in lines[2:]] == ["1", "2", "4", "8"]
    assert lines[2].endswith("does not fit") and lines[3].split()[1:3] == ["78.7", "GB"]
    assert main(["plan", flash, "--gpus", "1", "--memory", "141"]) == 1
    assert main(["plan", flash, "--gpus", "2", "--memory", "141", "--cache-tokens", "1000000"]) == 0
    assert main(["plan", flash, "--gpus", "2", "--memory", "80", "--cache-tokens", "10000000"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("GB, does not fit")


def test_wrong_calls(capsys, tmp_path):
    flash = str(VENDORED / "deepseek_v4_flash_config.json")
    assert main(["plan", flash, "--gpus", "3"]) == 2
    assert "--gpus: 3 do not evenly share the 129280 tokens of embed" in capsys.readouterr().err
    assert main(["plan", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err


def test_nothing_is_allocated():
    """The model of 671 GB has shapes alone."""
    config = read_config(VENDORED / "deepseek_v32_config.json")
    assert precision_of(config).dtype == torch.bfloat16
    assert plan(config, precision_of(config, dequantize=True), 8).weights > 160e9


def test_experts_that_are_widened_take_twice_the_memory():
    config = read_config(VENDORED / "deepseek_v4_flash_config.json")
    found = [plan(config, precision_of(config, widen_experts=widen), 2).weights for widen in (False, True)]
    assert 1.7 < found[1] / found[0] < 2


def test_what_does_not_fit_is_refused(monkeypatch, capsys):
    """Before anything is read: there are no weights beside the configuration."""
    flash = VENDORED / "deepseek_v4_flash_config.json"
    found = plan(read_config(flash), precision_of(read_config(flash)), 2)
    check_fits(found, 141 * 10**9, 10**6)
    with pytest.raises(
        ValueError, match=r"gpus: each of 2 would hold 78\.7 GB .* accepted: at most 90% of the 80\.0 GB"
    ):
        check_fits(found, 80 * 10**9, 1)
    with pytest.raises(ValueError, match=r"a cache for 20000000 tokens 1\d\d\.\d GB"):
        check_fits(found, 141 * 10**9, 2 * 10**7)

    class Gpu:
        total_memory = 80 * 10**9

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: Gpu)
    assert main(["generate", str(flash), "--gpus", "2", "--prompt", "x"]) == 2
    assert "--gpus: each of 2 would hold 78.7 GB of weights" in capsys.readouterr().err
    assert main(["generate", str(flash), "--gpus", "4", "--prompt", "x"]) == 2
    assert "--gpus: must be at most the 2 that torch sees, got 4" in capsys.readouterr().err
