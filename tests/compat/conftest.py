"""The fixtures of the ops' tests that run the code of ops for a GPU on a CPU, up to the launches."""

from tests.ops.conftest import kernel_path, named_launches  # noqa: F401
