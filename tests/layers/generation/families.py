"""Families of models for tests that run once for each: GLM is DeepSeek-V3.2 with a selection that layers share, so most
of what it does differently shows in another family's test."""

import pytest

from dsa_layers.models import registry

FAMILIES = [
    pytest.param(family, marks=pytest.mark.slow) if family == "glm_moe_dsa" else family for family in registry.FAMILIES
]
