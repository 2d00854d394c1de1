"""A call that is timed, and in one line why one of another library could not be."""

from collections.abc import Callable

Call = Callable[[], object]
_LINE = 200  # characters of a reason


def reason(error: BaseException) -> str:
    """The first line of what an exception says, or its type."""
    lines = str(error).strip().splitlines()
    return lines[0][:_LINE] if lines else type(error).__name__
