"""What is wrong with a checkpoint, told at once."""

from pathlib import Path

from dsa_layers.errors import CheckpointError

_SHOWN_PROBLEMS = 10


class Problems:
    """What is wrong with a checkpoint, gathered so that all of it is reported at once: the first ten problems in full,
    and how many more there are."""

    def __init__(self) -> None:
        self._shown: list[str] = []
        self._count = 0

    def add(self, problem: str) -> None:
        self._count += 1
        if self.shows_more:
            self._shown.append(problem)

    @property
    def shows_more(self) -> bool:
        """Whether the next problem will be reported in full."""
        return len(self._shown) < _SHOWN_PROBLEMS

    def raise_if_any(self, directory: Path) -> None:
        """Raises one CheckpointError for all problems."""
        if not self._count:
            return
        lines = self._shown.copy()
        if self._count > len(lines):
            lines.append(f"and {self._count - len(lines)} more")
        count = "1 problem" if self._count == 1 else f"{self._count} problems"
        raise CheckpointError(f"{directory}: {count}, nothing was loaded:\n" + "\n".join(f"  {line}" for line in lines))
