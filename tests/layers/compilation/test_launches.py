"""Upper bounds of the launches of dsa's kernels and PyTorch's operators in decoding and drafting passes."""

import functools
from collections import Counter

import pytest
import torch
from torch import nn

from dsa.runtime import asked_variants
from dsa_layers.batch.decode_batch import DecodeInputs
from dsa_layers.compilation import META, without_memory
from dsa_layers.generation.steps import DraftInputs, DraftStep
from dsa_layers.io.loading import precision_of
from tests.layers.layers.calls import Operators
from tests.layers.models.configs import published

# (sequences, tokens per sequence: 1 + drafts) of a pass.
PASSES = [*((n, 1) for n in (1, 16, 64, 128, 256)), *((n, next_n) for next_n in (2, 4) for n in (16, 64, 128))]
# Upper bounds of a layer's launches: a row per kind of layer, in the model's order, and a column per number of tokens
# in a pass. Kinds of V4: "hashed" layers choose experts by token id; "ratio r" layers compress r tokens to an entry.
# V4's first layer also projects its input streams. Each other layer gets the projection from the layer before.
TOKENS = 1, 16, 32, 64, 128, 256, 512
MOST = {
    "deepseek_v32": {"dense": (21, 21, 22, 22, 23, 23, 24), "experts": (26, 26, 27, 27, 30, 30, 30)},
    "glm_5_2": {
        "dense": (21, 21, 23, 22, 23, 23, 23),
        "experts and another layer's selection": (20, 20, 22, 21, 23, 23, 22),
        "experts": (26, 26, 28, 27, 30, 30, 29),
    },
    "deepseek_v4_flash": {
        "window, hashed": (25, 26, 26, 26, 36, 36, 36),
        "ratio 4, hashed": (32, 33, 33, 33, 43, 43, 43),
        "ratio 128": (26, 27, 27, 27, 30, 30, 30),
        "ratio 4": (32, 33, 33, 33, 36, 36, 36),
    },
}
# Upper bounds of launches that do not repeat per layer: (without drafts, with drafts).
MOST_BESIDE = {"deepseek_v32": (9, 11), "glm_5_2": (9, 11), "deepseek_v4_flash": (21, 28)}
# Upper bounds of a drafting pass: a row each for 1, 2 and 3 drafts, and a column per number of sequences.
DRAFTING = 1, 16, 64, 128
MOST_OF_DRAFTS = {
    "deepseek_v32": ((52, 53, 56, 56), (94, 96, 99, 102), (136, 137, 142, 148)),
    "glm_5_2": ((53, 55, 57, 57), (88, 90, 94, 94), (123, 124, 129, 132)),
    "deepseek_v4_flash": ((57, 58, 61, 61), (106, 108, 111, 114), (155, 158, 161, 167)),
}


class Twice(nn.Module):
    """Runs a layer twice. `found` gets the launches of the second run. `launches` keeps only the launches that the
    first run has in addition, because it also computes tensors that all layers of the pass share."""

    def __init__(self, layer, launches):
        super().__init__()
        self.layer, self.launches, self.found = layer, launches, []

    def forward(self, *args, **kwargs):
        start = len(self.launches)
        self.layer(*args, **kwargs)
        before = len(self.launches)
        result = self.layer(*args, **kwargs)
        self.found = self.launches[before:]
        first = Counter(self.launches[start:before])
        del self.launches[start:]
        self.launches += (first - Counter(self.found)).elements()
        return result


@pytest.fixture
def launches(monkeypatch):
    """Return the growing list of the names of launches: kernels, and PyTorch's operators."""
    names = []

    def note(func, _):
        views = [r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns]
        if not all(views) and "empty" not in func.name():  # views and allocations launch nothing
            names.append(func.name())

    def launch(variant, *arguments):
        names.append(variant.function.removeprefix("compile_"))

    def product(*args, **kwargs):
        names.append("mm")
        return asked_variants._product(*args, **kwargs)

    monkeypatch.setattr(asked_variants, "launch", launch)
    as_on_gpu = [(owner, name, product if name == "mm" else value) for owner, name, value in asked_variants._AS_ON_GPU]
    monkeypatch.setattr(asked_variants, "_AS_ON_GPU", as_on_gpu)
    with Operators(note):
        yield names


@functools.cache
def made(name):
    """Return (model, cache, the model's ModuleList of layers, a list of its original layers)."""
    config = published(name)
    model, cache = without_memory(config, precision_of(config), drafter=True)
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == config.num_hidden_layers)
    return model, cache, layers, list(layers)


@pytest.fixture
def published_model(launches):
    """Return a function from a name to (model, cache, layers), with each layer wrapped in `Twice`."""

    def make(name):
        model, cache, layers, plain = made(name)
        for i, layer in enumerate(plain):
            layers[i] = Twice(layer, launches)
        return model, cache, layers

    return make


def inputs_of(cache, count, next_n):
    return DecodeInputs(count, 8192 // cache.page_size, cache.page_size, META, next_n)


def check(names, allowed, kind="pass"):
    assert len(names) <= allowed, f"{kind}: {len(names)} launches for {allowed}, {' '.join(names)}"


@pytest.mark.parametrize(("count", "next_n"), PASSES)
@pytest.mark.parametrize("name", MOST)
def test_launches_of_a_pass(name, count, next_n, published_model, launches):
    """The first pass counts the launches of each layer (`Twice`), and the second pass all others."""
    model, cache, layers = published_model(name)
    inputs = inputs_of(cache, count, next_n)
    with torch.inference_mode(), asked_variants.asked_variants("sm_90"):
        model(inputs.tokens, inputs.batch(), cache)
        found = [layer.found for layer in layers if layer.found]
        launches.clear()
        model(inputs.tokens, inputs.batch(), cache)
    for (kind, most), names in zip(MOST[name].items(), found, strict=True):
        check(names, most[TOKENS.index(count * next_n)], kind)
    check(launches, MOST_BESIDE[name][next_n > 1])


@pytest.mark.parametrize(("count", "drafts"), [(n, drafts) for drafts in (1, 2, 3) for n in DRAFTING])
@pytest.mark.parametrize("name", MOST)
def test_launches_of_drafts(name, count, drafts, published_model, launches):
    """Count the drafter's pass over the verified tokens, and one step for each draft after the first."""
    model, cache, _ = published_model(name)
    with torch.inference_mode(), asked_variants.asked_variants("sm_90"):
        inputs = inputs_of(cache, 1, 1)
        row = model.states(inputs.tokens, inputs.batch(), cache)[0]
        step = DraftStep(model.drafter, cache, drafts, None, META, capture=False)
        inputs = DraftInputs(count, 8192 // cache.page_size, cache.page_size, META, drafts, row)
        step._run(inputs)
        launches.clear()
        step._run(inputs)
    check(launches, MOST_OF_DRAFTS[name][drafts - 1][DRAFTING.index(count)])
