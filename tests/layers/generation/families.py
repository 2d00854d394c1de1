"""The families of models, as parameters of tests. GLM is marked slow: it is DeepSeek-V3.2 with selections that layers
share, so other families' tests find most errors."""

import pytest

from dsa_layers.models import registry

FAMILIES = [
    pytest.param(family, marks=pytest.mark.slow) if family == "glm_moe_dsa" else family for family in registry.FAMILIES
]
