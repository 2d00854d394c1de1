"""TODO."""

from tests.hostile import IndexArgument

ARGUMENTS: list[IndexArgument] = []
