"""The variables of a rank, and which rank failed first."""

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from dsa_layers.parallel.launch import NUMBERS, first_failed, note_failure, started_ranks


def set_numbers(monkeypatch, *values):
    for name, value in zip(NUMBERS, values, strict=True):
        monkeypatch.setenv(name, value)


def test_the_number_of_started_ranks_is_that_of_the_environment(monkeypatch):
    set_numbers(monkeypatch, "1", "1", "2")
    assert started_ranks() == 2
    monkeypatch.delenv("RANK")
    assert started_ranks() is None


# {why rank 1 failed first: {rank, in the order found: (exit code, when the launcher found it, time in note_failure)}}
SECOND_FAILED_FIRST = {
    "the launcher's SIGTERM is no cause": {1: (3, 100, None), 0: (-15, 100, None)},
    "the first SIGTERM is not the launcher's": {1: (-15, 100, None), 0: (1, 100, 100.4)},
    "a killed rank took 2 s to end": {0: (1, 100, 100.4), 1: (-9, 102, None)},
    "the launcher's SIGKILL is no cause": {1: (1, 100, 99.9), 0: (-9, 130, None)},
    "an abort follows from a lost connection": {0: (-6, 100, None), 1: (2, 101, None)},
    "the launcher's SIGKILL after a note is no cause": {1: (-9, 100, None), 0: (-9, 130, 100.4)},
    "an abort after a note": {0: (1, 100, 100.5), 1: (-6, 100, 100.4)},
    "noted 0.1 s earlier": {0: (1, 100, 100.5), 1: (1, 100, 100.4)},
    "noted beats not noted in the same second": {0: (1, 100, None), 1: (1, 101, 100.9)},
}


@pytest.mark.parametrize("ends", SECOND_FAILED_FIRST.values(), ids=SECOND_FAILED_FIRST)
def test_the_first_failed_rank_is_found(monkeypatch, tmp_path, ends):
    failures = {}
    for rank, (code, found, noted) in ends.items():
        path = tmp_path / str(rank)
        if noted is not None:
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
            monkeypatch.setattr("signal.signal", lambda *_: None)
            monkeypatch.setattr("time.time", lambda noted=noted: noted)
            note_failure("wrong")
        monkeypatch.setattr("time.time", lambda found=found: found)
        failures[rank] = ProcessFailure(rank, 1, code, str(path))
    assert first_failed(failures) == 1
