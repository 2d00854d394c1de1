"""Parity of A.X-K2 with transformers' model."""

from tests.layers.models import hf_models
from tests.layers.models.parity import ParityTests, assert_parity


class TestAXK2(ParityTests):
    build = staticmethod(hf_models.axk2)


def test_logits_agree_with_groups_and_more_dense_layers(tmp_path):
    changes = {
        "n_group": 4, "topk_group": 2, "mlp_layer_types": ["dense", "dense", "sparse"], "n_shared_experts": 2,
        "norm_topk_prob": False, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    assert_parity(hf_models.axk2, tmp_path, **changes)
