"""Fixtures for the kernels' path without a GPU, shared with the tests of ops."""

from tests.ops.conftest import kernel_path, named_launches  # noqa: F401
