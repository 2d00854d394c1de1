"""Families are found by their folders, and generation takes any model that has what it asks for."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsa_layers import families
from dsa_layers.families.model import Model
from dsa_layers.families.registry import family, model_types
from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.io.loading import load_model

FOLDER = Path(families.__file__).parent


def test_every_family_goes_by_its_folder():
    assert {"deepseek_v32", "deepseek_v4", "glm_moe_dsa"} <= set(model_types())
    assert list(model_types()) == sorted(model_types())
    for model_type in model_types():
        names = {path.name for path in (FOLDER / model_type).glob("*.py")}
        assert names >= {"config.py", "family.py", "model.py", "tiny.py"}
        # Whatever its model, it comes from its own folder.
        own = family(model_type)
        for part in (own.config, own.model):
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


def test_a_folder_outside_of_the_package_is_found_once_the_package_looks_there(tmp_path, monkeypatch):
    shutil.copytree(FOLDER / "deepseek_v32", tmp_path / "deepseek_v99")
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    assert "deepseek_v99" in model_types()


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


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint, progress=False)


def test_generation_takes_any_model(model):
    assert isinstance(model, Model)
    expected, got = (
        Generator(one, cache_tokens=256).generate([[5, 6, 7], [8]], SamplingParams(max_tokens=5))
        for one in (model, Other(model))
    )
    assert [one.tokens for one in got] == [one.tokens for one in expected]


@pytest.mark.parametrize("missing", ["config", "page_size", "captures_decode", "make_cache", "parameters"])
def test_what_lacks_something_is_no_model(model, missing):
    other = Other(model)
    holder = type("Lacking", (), {name: getattr(other, name) for name in dir(other) if name[:2] != "__"})
    delattr(holder, missing)
    with pytest.raises(TypeError, match="model: must be a model as load_model returns it, got Lacking"):
        Generator(holder(), cache_tokens=256)
