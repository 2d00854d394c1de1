import pytest
import torch

from tests.layers.hf.pairs import KINDS, Pair, pair


@pytest.fixture(scope="session", params=KINDS)
def models(request, tmp_path_factory) -> Pair:
    """The `Pair` of each kind. Tests must not change the models."""
    return pair(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokens() -> torch.Tensor:
    return torch.randint(0, 255, (3, 70), generator=torch.Generator().manual_seed(1))
