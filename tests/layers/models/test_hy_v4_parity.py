"""Parity of Hy4 with transformers' model."""

import pytest

from tests.layers.models import hf_models
from tests.layers.models.parity import ParityTests, assert_parity


class TestHYV4(ParityTests):
    build = staticmethod(hf_models.hy_v4)

    def test_shared_layers_have_no_indexer(self, models):
        names = {name.split(".")[2] for name in models[1].state_dict() if ".indexer." in name}
        assert names == {"0", "1", "5"}


@pytest.mark.filterwarnings("ignore:.*only the text model is used; left out. vision")
@pytest.mark.filterwarnings("ignore:.*unknown fields are ignored")
def test_the_text_model_of_hy4_vl(tmp_path):
    assert_parity(hf_models.hy_v4_vl, tmp_path, num_hidden_layers=4)


def test_logits_agree_with_three_streams_and_experts_in_all_layers(tmp_path):
    changes = {
        "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "full"], "hc_mult": 3,
        "mlp_layer_types": ["sparse"] * 4, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.5,
    }  # fmt: skip
    assert_parity(hf_models.hy_v4, tmp_path, **changes)
