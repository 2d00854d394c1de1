"""Fixtures from tests/ops: run the code for a GPU on a CPU, up to the launches, and list the launches."""

from tests.ops.conftest import kernel_path, named_launches  # noqa: F401
