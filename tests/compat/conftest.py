"""The kernels' path without a GPU, as in the tests of ops."""

from tests.ops.conftest import kernel_path, named_launches  # noqa: F401
