"""Passes whose calls are recorded launch what they launched before."""

import re
import subprocess
import sys

import pytest

from dsa_layers.cache.drafts import DRAFTS
from tests.layers.generation.families import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_passes(family, tiny_checkpoint):
    """In inference mode, as generation runs, with counts of the sequences' last tokens that are not contiguous."""
    command = [sys.executable, "-m", "tests.layers.generation.recorded_passes", tiny_checkpoint(family)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    found = [re.fullmatch(r"\d drafts: (\d+) launches, (\d+) ops recorded", line) for line in (*lines, last)]
    assert all(found) and len(found) == DRAFTS + 1, done.stdout
    assert all(int(match[1]) > 60 and int(match[2]) > 15 for match in found), done.stdout
