"""Parity of A.X-K2, dots3-note, Hy4 and Mistral Large 4 with transformers' models."""

from typing import ClassVar

import pytest

from tests.layers.models import hf_models
from tests.layers.models.parity import ParityTests, assert_parity, layers_with

pytestmark = pytest.mark.filterwarnings("ignore:.*only the text model is used; left out. vision")


class TestAXK2(ParityTests):
    build = staticmethod(hf_models.axk2)


class TestDots3Note(ParityTests):
    build = staticmethod(hf_models.dots3_note)
    indexed: ClassVar = {0, 2, 4}  # the others have a window


class TestHYV4(ParityTests):
    build = staticmethod(hf_models.hy_v4)
    indexed: ClassVar = {0, 1, 5}


class TestMistralLarge4(ParityTests):
    build = staticmethod(hf_models.mistral_large4)
    indexed: ClassVar = {0, 1, 3, 4, 6}

    def test_layers_have_only_their_own_latents(self, models):
        assert layers_with("kv_a_proj_with_mqa", models[1]) == {0, 1, 2, 3}


CASES = {
    "A.X-K2 with groups and more dense layers": (hf_models.axk2, {
        "n_group": 4, "topk_group": 2, "mlp_layer_types": ["dense", "dense", "sparse"], "n_shared_experts": 2,
        "norm_topk_prob": False, "rms_norm_eps": 1e-5,
    }),
    # By default, layers 0, 1, 5, ... have an indexer.
    "dots3-note with default layers": (hf_models.dots3_note, {
        "layer_types": None, "num_hidden_layers": 7, "n_group": 2, "rms_norm_eps": 1e-5, "sliding_window": 5,
    }),
    "Hy4 with three streams and experts in all layers": (hf_models.hy_v4, {
        "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "full"], "hc_mult": 3,
        "mlp_layer_types": ["sparse"] * 4, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.5,
    }),
    "text model of Hy4-VL": (hf_models.hy_v4_vl, {"num_hidden_layers": 4}),
    # By default, every fourth layer has no rope, and every layer has an indexer and own latents.
    "Mistral Large 4 with default layers": (hf_models.mistral_large4, {
        "indexer_types": None, "kv_source_layers": None, "no_rope_layers": None, "num_hidden_layers": 5,
        "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.5,
    }),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*unknown fields are ignored")
@pytest.mark.parametrize(("build", "changes"), CASES.values(), ids=CASES)
def test_logits_agree_with_other_options(build, changes, tmp_path):
    assert_parity(build, tmp_path, **changes)
