"""The registry finds families by model type, and `Generator` accepts any object with the attributes of `Model`."""

import pytest

from dsa_layers import Generator, SamplingParams, load_model
from dsa_layers.models.family import family
from dsa_layers.models.protocols import Model
from dsa_layers.models.registry import FAMILIES


def test_every_family_is_in_a_file_named_by_its_model_type():
    assert {"deepseek_v32", "deepseek_v4", "glm_moe_dsa"} <= FAMILIES.keys()
    for model_type, module in FAMILIES.items():
        assert module == f"dsa_layers.models.{model_type}"
        own = family(model_type)
        assert own.config.model_type == model_type
        assert own.config.__module__ == own.model.__module__ == module


def test_an_unknown_model_type_is_refused():
    with pytest.raises(ValueError, match=r"model_type: must be one of 'axk2', .*, got 'sparse_mla'"):
        family("sparse_mla")


def test_a_family_outside_of_the_package_is_found_after_it_is_added(tmp_path, monkeypatch):
    (tmp_path / "deepseek_v99.py").write_text("FAMILY = 99\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(FAMILIES, "deepseek_v99", "deepseek_v99")
    assert family("deepseek_v99") == 99


class Other:
    """A wrapper of `model` that is no torch.nn.Module, with the attributes of `Model`."""

    page_size, captures_decode = 32, False

    def __init__(self, model):
        self.config, self.make_cache, self.parameters = model.config, model.make_cache, model.parameters
        self.model = model

    def __call__(self, *arguments, **options):
        return self.model(*arguments, **options)


def test_generation_takes_any_model_that_has_what_it_asks_for(checkpoint):
    model = load_model(checkpoint, progress=False)
    assert isinstance(model, Model)
    params = SamplingParams(max_tokens=5)
    outputs = (Generator(one, cache_tokens=256).generate([[5, 6, 7], [8]], params) for one in (model, Other(model)))
    expected, got = outputs
    assert [one.tokens for one in got] == [one.tokens for one in expected]
    for missing in ("config", "make_cache", "parameters"):
        lacking = Other(model)
        delattr(lacking, missing)
        with pytest.raises(TypeError, match="model: must be a model as load_model returns it, got Other"):
            Generator(lacking, cache_tokens=256)
