"""Parity of all families with transformers' models. test_glm_moe_dsa_parity.py has further tests of GLM-5."""

from typing import ClassVar

import pytest
import torch

from dsa_layers import SequenceBatch, load_model
from tests.layers.models import hf_models
from tests.layers.models.parity import ParityTests, assert_same, layers_with

pytestmark = pytest.mark.filterwarnings("ignore:.*only the text model is used; left out. vision")


class TestDeepseekV32(ParityTests):
    build = staticmethod(hf_models.deepseek_v32)


class TestDeepseekV4(ParityTests):
    build = staticmethod(hf_models.deepseek_v4)
    indexed: ClassVar = {1, 3}
    page_size = 32
    lengths: ClassVar = [1, 3, 4, 5, 8, 15, 16, 17, 33, 70]
    chunks: ClassVar = [[1] * 70, [70], [5, 7, 13, 1, 1, 21, 22], [16] * 4 + [6], [3, 2, 12, 30, 1, 1, 1, 20]]


class TestAXK2(ParityTests):
    build = staticmethod(hf_models.axk2)


class TestDots3Note(ParityTests):
    build = staticmethod(hf_models.dots3_note)
    indexed: ClassVar = {0, 2, 4}  # the others have a window


class TestGlm5Next(ParityTests):
    build = staticmethod(hf_models.glm5_next)
    indexed: ClassVar = {1, 3}  # the others have Kimi delta attention


class TestHYV4(ParityTests):
    build = staticmethod(hf_models.hy_v4)
    indexed: ClassVar = {0, 1, 5}


class TestMistralLarge4(ParityTests):
    build = staticmethod(hf_models.mistral_large4)
    indexed: ClassVar = {0, 1, 3, 4, 6}

    def test_layers_have_only_their_own_latents(self, models):
        assert layers_with("kv_a_proj_with_mqa", models[1]) == {0, 1, 2, 3}


OTHER_OPTIONS = {
    "DeepSeek-V3.2 without groups and YaRN": (hf_models.deepseek_v32, {
        "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "first_k_dense_replace": 0, "num_hidden_layers": 2,
        "routed_scaling_factor": 1.7, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    }),
    "DeepSeek-V4 with another schedule of layers": (hf_models.deepseek_v4, {
        "compress_ratios": [128, 0, 128], "num_hidden_layers": 3, "num_hash_layers": 0, "hc_mult": 2,
        "rope_parameters": {"rope_type": "default"}, "compress_rope_theta": 5e4, "routed_scaling_factor": 0.7,
    }),
    "GLM-5 with groups, YaRN and a listed schedule": (hf_models.glm_moe_dsa, {
        "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 0, "rms_norm_eps": 1e-5,
        "indexer_types": ["full", "shared", "shared", "full"], "rope_parameters": hf_models.YARN,
    }),
    "A.X-K2 with groups and more dense layers": (hf_models.axk2, {
        "n_group": 4, "topk_group": 2, "mlp_layer_types": ["dense", "dense", "sparse"], "n_shared_experts": 2,
        "norm_topk_prob": False, "rms_norm_eps": 1e-5,
    }),
    # By default, layers 0, 1, 5, ... have an indexer.
    "dots3-note with default layers": (hf_models.dots3_note, {
        "layer_types": None, "num_hidden_layers": 7, "n_group": 2, "rms_norm_eps": 1e-5, "sliding_window": 5,
    }),
    "GLM-5.3-Flash with other pools, streams and decay": (hf_models.glm5_next, {
        "index_kpool": 8, "linear_conv_kernel_dim": 3, "linear_lower_bound": -2.0, "rms_norm_eps": 1e-5, "n_group": 2,
        "hc_mult": 2, "hc_sinkhorn_iters": 5,
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


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*unknown fields are ignored")
@pytest.mark.parametrize(("build", "changes"), OTHER_OPTIONS.values(), ids=OTHER_OPTIONS)
def test_logits_agree_with_other_options(build, changes, tmp_path):
    theirs, tokens = build(tmp_path, **changes), torch.randint(0, 256, (40,))
    ours = load_model(tmp_path, dtype=torch.float32, progress=False)
    got = ours(tokens, SequenceBatch.without_cache([40]), all_tokens=True)
    assert_same(got, theirs(tokens[None]).logits[0])
