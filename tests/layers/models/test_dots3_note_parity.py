"""Parity of dots3-note with transformers' model."""

from tests.layers.models import hf_models
from tests.layers.models.parity import ParityTests, assert_parity


class TestDots3Note(ParityTests):
    build = staticmethod(hf_models.dots3_note)

    def test_layers_with_a_window_have_no_indexer(self, models):
        names = {name.split(".")[2] for name in models[1].state_dict() if ".indexer." in name}
        assert names == {"0", "2", "4"}


def test_logits_agree_with_default_layers(tmp_path):
    """By default, layers 0, 1, 5, ... have an indexer."""
    changes = {"layer_types": None, "num_hidden_layers": 7, "n_group": 2, "rms_norm_eps": 1e-5, "sliding_window": 5}
    assert_parity(hf_models.dots3_note, tmp_path, **changes)
