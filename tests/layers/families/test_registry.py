"""Families are found by their folders, and another one needs nothing but its folder."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsa_layers import families
from dsa_layers.checkpoint.loading import load_model
from dsa_layers.command.main import main
from dsa_layers.families.config import read_config
from dsa_layers.families.model import Model
from dsa_layers.families.registry import family, model_types
from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams

FOLDER = Path(families.__file__).parent


def test_every_family_goes_by_its_folder():
    assert {"deepseek_v32", "deepseek_v4", "glm_moe_dsa"} <= set(model_types())
    assert list(model_types()) == sorted(model_types())
    for model_type in model_types():
        names = {path.name for path in (FOLDER / model_type).glob("*.py")}
        assert names >= {"config.py", "family.py", "manifest.py", "model.py", "tiny.py"}
        # Whatever its model, it comes from its own folder.
        own = family(model_type)
        for part in (own.read_config, own.model, own.manifest):
            assert part.__module__.startswith(f"dsa_layers.families.{model_type}.")


def test_listing_families_imports_none():
    script = (
        "import sys; from dsa_layers.families.registry import model_types; assert model_types(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_a_family_that_there_is_not():
    with pytest.raises(ValueError, match=r"model_type: must be one of 'deepseek_v32', .*, got 'sparse_mla'"):
        family("sparse_mla")


def test_another_family_is_one_folder(tmp_path, monkeypatch, capsys):
    """With the folder there, its checkpoints are written, read, loaded and continued, by the command too."""
    shutil.copytree(FOLDER / "deepseek_v32", tmp_path / "deepseek_v99", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (tmp_path / "deepseek_v99").glob("*.py"):
        text = path.read_text().replace("families.deepseek_v32", "families.deepseek_v99")
        path.write_text(text.replace('model_type = "deepseek_v32"', 'model_type = "deepseek_v99"'))
    tiny = tmp_path / "deepseek_v99" / "tiny.py"
    tiny.write_text(tiny.read_text().replace('"n_group"', '"model_type": "deepseek_v99", "n_group"'))
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    assert "deepseek_v99" in model_types()

    directory = tmp_path / "checkpoint"
    assert main(["tiny", str(directory), "--model", "deepseek_v99"]) == 0
    assert read_config(directory).model_type == "deepseek_v99"
    model = load_model(directory, progress=False)
    assert type(model).__module__ == "dsa_layers.families.deepseek_v99.model"
    (completion,) = Generator(model, cache_tokens=256).generate([[5, 6, 7]], SamplingParams(max_new_tokens=3))
    assert completion.tokens
    capsys.readouterr()
    for name in [name for name in sys.modules if "deepseek_v99" in name]:
        monkeypatch.delitem(sys.modules, name)


class Other:
    """A model of no family, and no torch.nn.Module: it has what generation asks for and nothing else."""

    page_size = 32
    captures_decode = False

    def __init__(self, model):
        self.config, self._model = model.config, model

    def make_cache(self, num_pages, page_size=page_size, device="cpu", *, state_slots=64):
        return self._model.make_cache(num_pages, page_size, device, state_slots=state_slots)

    def parameters(self):
        return self._model.parameters()

    def __call__(self, tokens, batch, cache=None, *, all_tokens=False):
        return self._model(tokens, batch, cache, all_tokens=all_tokens)


def test_generation_takes_any_model(checkpoint):
    model = load_model(checkpoint, progress=False)
    assert isinstance(model, Model)
    expected, got = (
        Generator(one, cache_tokens=256).generate([[5, 6, 7], [8]], SamplingParams(max_new_tokens=5))
        for one in (model, Other(model))
    )
    assert [one.tokens for one in got] == [one.tokens for one in expected]


@pytest.mark.parametrize("missing", ["config", "page_size", "captures_decode", "make_cache", "parameters"])
def test_what_lacks_something_is_no_model(checkpoint, missing):
    other = Other(load_model(checkpoint, progress=False))
    holder = type("Lacking", (), {name: getattr(other, name) for name in dir(other) if name[:2] != "__"})
    delattr(holder, missing)
    with pytest.raises(TypeError, match="model: must be a model as load_model returns it, got Lacking"):
        Generator(holder(), cache_tokens=256)
