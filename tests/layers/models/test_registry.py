"""Families are found by their model types, and generation takes any model that has what it asks for."""

import subprocess
import sys

import pytest

from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.io.loading import load_model
from dsa_layers.models.protocols import Model
from dsa_layers.models.registry import FAMILIES, family


def test_every_family_is_in_a_file_named_by_its_model_type():
    assert {"deepseek_v32", "deepseek_v4", "glm_moe_dsa"} <= FAMILIES.keys()
    for model_type, module in FAMILIES.items():
        assert module == f"dsa_layers.models.{model_type}"
        own = family(model_type)
        assert own.config.model_type == model_type
        assert own.config.__module__ == own.model.__module__ == module


def test_the_registry_imports_no_family():
    script = "import sys; from dsa_layers.models.registry import FAMILIES; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_an_unknown_model_type_is_refused():
    with pytest.raises(ValueError, match=r"model_type: must be one of 'deepseek_v32', .*, got 'sparse_mla'"):
        family("sparse_mla")


def test_a_family_outside_of_the_package_is_found_after_it_is_added(tmp_path, monkeypatch):
    (tmp_path / "deepseek_v99.py").write_text("FAMILY = 99\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(FAMILIES, "deepseek_v99", "deepseek_v99")
    assert family("deepseek_v99") == 99


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
