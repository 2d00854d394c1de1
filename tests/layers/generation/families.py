"""The families of models, as parameters of tests. Families in SLOW share most code with others: slow tests."""

import pytest

from dsa_layers.models import registry
from dsa_layers.models.family import family


def has_drafter(name):
    return family(name).drafter is not None


SLOW = "axk2", "dots3_note", "glm5_next", "glm_moe_dsa", "hy_v4_vl", "mistral_large4"


def parameters(families):
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in families]


FAMILIES = parameters(registry.FAMILIES)
DRAFTED = parameters(name for name in registry.FAMILIES if has_drafter(name))
