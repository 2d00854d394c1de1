"""What a process is told as a rank."""

import pytest

from dsa_layers.parallel.environment import NUMBERS, started_ranks


def set_numbers(monkeypatch, *values):
    for name, value in zip(NUMBERS, values, strict=True):
        monkeypatch.setenv(name, value)


def test_ranks_that_were_started(monkeypatch):
    set_numbers(monkeypatch, "1", "1", "2")
    assert started_ranks() == 2
    monkeypatch.delenv("RANK")
    assert started_ranks() is None


@pytest.mark.parametrize(
    ("rank", "ranks", "problem"),
    [
        ("2", "2", "RANK: must be below WORLD_SIZE=2, got 2"),
        ("0", "0", "RANK: must be below WORLD_SIZE=0, got 0"),
        ("-1", "2", "RANK: must be a number, got '-1'"),
    ],
)
def test_a_rank_that_there_cannot_be(monkeypatch, rank, ranks, problem):
    """Ranks that wait for each other would wait for hours."""
    set_numbers(monkeypatch, rank, "0", ranks)
    with pytest.raises(ValueError, match=f"^{problem}$"):
        started_ranks()
