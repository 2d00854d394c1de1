"""Fixtures that run the launching code of ops without a GPU. They are those of the ops' tests."""

from tests.ops.conftest import kernel_path, named_launches  # noqa: F401
