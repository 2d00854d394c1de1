"""Parity of Mistral Large 4 with transformers' model."""

import pytest

from tests.layers.models import hf_models
from tests.layers.models.parity import ParityTests, assert_parity

pytestmark = pytest.mark.filterwarnings("ignore:.*only the text model is used; left out. vision")


class TestMistralLarge4(ParityTests):
    build = staticmethod(hf_models.mistral_large4)

    def test_layers_have_only_their_own_parts(self, models):
        names = [name.split(".")[2:5] for name in models[1].state_dict() if name.startswith("model.layers.")]
        assert {name[0] for name in names if "indexer" in name} == {"0", "1", "3", "4", "6"}
        assert {name[0] for name in names if "kv_a_proj_with_mqa" in name} == {"0", "1", "2", "3"}


def test_logits_agree_with_default_layers(tmp_path):
    """By default every fourth layer has no rope, and every layer has an indexer and own latents."""
    changes = {"indexer_types": None, "kv_source_layers": None, "no_rope_layers": None, "num_hidden_layers": 5}
    assert_parity(hf_models.mistral_large4, tmp_path, **changes, rms_norm_eps=1e-5, routed_scaling_factor=1.5)
