"""Fixtures with which ops run the code that launches kernels, but without a GPU. The tests of ops share them."""

from tests.ops.conftest import kernel_path, named_launches  # noqa: F401
