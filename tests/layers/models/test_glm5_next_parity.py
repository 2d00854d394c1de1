"""Parity of GLM-5.3-Flash with transformers' model."""

from tests.layers.models import hf_models
from tests.layers.models.parity import ParityTests, assert_parity


class TestGlm5Next(ParityTests):
    build = staticmethod(hf_models.glm5_next)

    def test_some_layers_have_an_indexer(self, models):
        names = {name.split(".")[2] for name in models[1].state_dict() if ".indexer." in name}
        assert names == {"1", "3"}


def test_logits_agree_with_other_settings(tmp_path):
    changes = {
        "index_kpool": 8, "linear_conv_kernel_dim": 3, "linear_lower_bound": -2.0, "rms_norm_eps": 1e-5, "n_group": 2,
        "hc_mult": 2, "hc_sinkhorn_iters": 5,
    }  # fmt: skip
    assert_parity(hf_models.glm5_next, tmp_path, **changes)
