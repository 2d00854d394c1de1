"""What a decoding step launches, layer by layer: kernels of dsa, and operators of PyTorch between them. A GPU runs a
short step no faster than its launches follow each other, so there is an upper bound, and the list when it is broken."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dsa_layers
from dsa.ops import asked_variants
from dsa_layers.batch.decode_inputs import DecodeInputs
from dsa_layers.compilation.passes import decode, without_memory
from dsa_layers.compilation.variants import precisions
from dsa_layers.families.config import read_config

VENDORED = Path(dsa_layers.__file__).parent / "vendored"
AS_LOADED = {"dtype": None, "dequantize": False, "kv_cache": None, "widen_experts": False}
# Of a layer of each kind, in the order in which the model has them.
MOST = {
    "deepseek_v32": {"dense": 21, "experts": 26},
    "glm_5_2": {"dense": 21, "experts and another layer's selection": 20, "experts": 26},
    "deepseek_v4_flash": {"window, hashed": 25, "ratio 4, hashed": 33, "ratio 128": 27, "ratio 4": 33},
}
# Of a step beside its layers: embedding, what layers share (angles, slots, counts), and what makes logits.
MOST_BESIDE = {"deepseek_v32": 9, "glm_5_2": 9, "deepseek_v4_flash": 21}


class Launches(TorchDispatchMode):
    """The names of what is launched, in its order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        views = [r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns]
        if not all(views) and "empty" not in func.name():
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Twice(nn.Module):
    """Runs a layer twice: what it makes for all layers of a pass is there the second time, which counts. What it
    launched for all layers the first time stays in the list of launches, and nothing else."""

    def __init__(self, layer, launches):
        super().__init__()
        self.layer, self.launches, self.found = layer, launches, []

    def forward(self, *args, **kwargs):
        start = len(self.launches.names)
        self.layer(*args, **kwargs)
        before = len(self.launches.names)
        result = self.layer(*args, **kwargs)
        self.found = self.launches.names[before:]
        first = Counter(self.launches.names[start:before])
        del self.launches.names[start:]
        self.launches.names += (first - Counter(self.found)).elements()
        return result


@pytest.fixture
def launches(monkeypatch):
    noted = asked_variants._NotedModule

    class Counted(noted):
        def __getattr__(self, name):
            value = super().__getattr__(name)
            if not name.startswith("compile_"):
                return value

            def compiled(*arguments):
                value(*arguments)
                return lambda *_: found.names.append(name.removeprefix("compile_"))

            return compiled

    def product(*args, **kwargs):
        found.names.append("mm")
        return asked_variants._product(*args, **kwargs)

    monkeypatch.setattr(asked_variants, "_NotedModule", Counted)
    as_on_gpu = [(owner, name, product if name == "mm" else value) for owner, name, value in asked_variants._AS_ON_GPU]
    monkeypatch.setattr(asked_variants, "_AS_ON_GPU", as_on_gpu)
    with Launches() as found:
        yield found


@pytest.fixture
def published_model(tmp_path, launches):
    """(model, cache, layers) of the published sizes, quantised as V3.2 is; each layer is one that runs `Twice`."""

    def make(published):
        names = published, "deepseek_v32"
        fields, v32 = (json.loads((VENDORED / f"{name}_config.json").read_text()) for name in names)
        fields.setdefault("quantization_config", v32["quantization_config"])
        (tmp_path / "config.json").write_text(json.dumps(fields))
        config = read_config(tmp_path)
        model, cache = without_memory(config, precisions(config, **AS_LOADED)[-1])
        layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == config.num_hidden_layers)
        for i, layer in enumerate(layers):
            layers[i] = Twice(layer, launches)
        return model, cache, layers

    return make


@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.parametrize("published", MOST)
def test_launches_of_a_layer(published, count, published_model):
    """An op counts as one, though some have two kernels."""
    model, cache, layers = published_model(published)
    with asked_variants.asked_variants("sm_90"):
        decode(model, cache, count, 8192)
    found = [layer.found for layer in layers if layer.found]
    assert len(found) == len(MOST[published])
    for (kind, most), names in zip(MOST[published].items(), found):
        assert len(names) <= most, f"{kind}: {len(names)} launches, {' '.join(names)}"


@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.parametrize("published", MOST)
def test_launches_beside_the_layers(published, count, published_model, launches):
    """Of a step that is captured: one of its size has run before, with the same inputs."""
    model, cache, _ = published_model(published)
    inputs = DecodeInputs(count, 8192 // cache.page_size, cache.page_size, torch.device("meta"))
    with torch.inference_mode(), asked_variants.asked_variants("sm_90"):
        model(inputs.tokens, inputs.batch(), cache)
        launches.names.clear()
        model(inputs.tokens, inputs.batch(), cache)
    names = launches.names
    assert len(names) <= MOST_BESIDE[published], f"{len(names)} launches, {' '.join(names)}"
