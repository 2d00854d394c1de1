"""What a decoding step launches, layer by layer: kernels of dsa, and operators of PyTorch between them. A GPU runs a
short step no faster than its launches follow each other, so there is an upper bound, and the list when it is broken."""

import json
from pathlib import Path

import pytest
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dsa_layers
from dsa.ops import asked_variants
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
    """Runs a layer twice: what it makes for all layers of a pass is there the second time, which counts."""

    def __init__(self, layer, launches):
        super().__init__()
        self.layer, self.launches, self.found = layer, launches, []

    def forward(self, *args, **kwargs):
        self.layer(*args, **kwargs)
        before = len(self.launches.names)
        result = self.layer(*args, **kwargs)
        self.found = self.launches.names[before:]
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


@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.parametrize("published", MOST)
def test_launches_of_a_layer(published, count, launches, tmp_path):
    """Of the published sizes, quantised as V3.2 is. An op counts as one, though some have two kernels."""
    fields, v32 = (json.loads((VENDORED / f"{name}_config.json").read_text()) for name in (published, "deepseek_v32"))
    fields.setdefault("quantization_config", v32["quantization_config"])
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = read_config(tmp_path)
    model, cache = without_memory(config, precisions(config, **AS_LOADED)[-1])
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == config.num_hidden_layers)
    for i, layer in enumerate(layers):
        layers[i] = Twice(layer, launches)
    with asked_variants.asked_variants("sm_90"):
        decode(model, cache, count, 8192)
    found = [layer.found for layer in layers if layer.found]
    assert len(found) == len(MOST[published])
    for (kind, most), names in zip(MOST[published].items(), found):
        assert len(names) <= most, f"{kind}: {len(names)} launches, {' '.join(names)}"
