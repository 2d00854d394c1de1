"""What conftest.py promises: a test's numbers are its own, whatever ran before it; slow tests take turns; the CPU's
instructions are those that the caller allows."""

import os
import random
import re
import subprocess
import sys
import zlib
from types import SimpleNamespace

import pytest
import torch

from tests import conftest


@pytest.fixture(scope="module")
def shared():
    return torch.rand(4), random.random()


def drawn_from(seed):
    own = random.Random(seed)
    return torch.rand(4, generator=torch.Generator().manual_seed(seed)), own.random()


@pytest.mark.parametrize("before", [0, 3])
def test_numbers_are_a_tests_own(before, shared, request):
    """Of the second as of the first, which alone has made what they share."""
    numbers, number = drawn_from(zlib.crc32(request.node.nodeid.encode()))
    assert torch.equal(torch.rand(4), numbers) and random.random() == number
    numbers, number = drawn_from(0)
    assert torch.equal(shared[0], numbers) and shared[1] == number
    torch.rand(before)


class Item:
    def __init__(self, nodeid, slow):
        self.nodeid, self.slow = nodeid, slow

    def get_closest_marker(self, name):
        return self.slow if name == "slow" else None


def collected(monkeypatch, commit="", **options):
    """The names of what is left of 60 tests, of which every second one is slow."""
    options = {"all": False, "file_or_dir": []} | options
    monkeypatch.setattr(conftest, "commit", lambda: commit)
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    config = SimpleNamespace(getoption=options.get, option=SimpleNamespace(**options), hook=hook)
    items = [Item(f"test_{i}", slow=i % 2 == 1) for i in range(60)]
    conftest.pytest_collection_modifyitems(config, items)
    return {item.nodeid for item in items}


def test_slow_tests_run_in_parts_that_rotate_by_commit(monkeypatch):
    fast, every = {f"test_{i}" for i in range(0, 60, 2)}, {f"test_{i}" for i in range(60)}
    runs = [collected(monkeypatch, str(commit)) for commit in range(40)]
    assert all(fast < run < every for run in runs) and set().union(*runs) == every
    assert collected(monkeypatch, all=True) == collected(monkeypatch, file_or_dir=["tests/test_it.py"]) == every


def test_the_instructions_in_force_are_those_that_the_caller_allows():
    """oneDNN names its own in front of its first product. Without a setting of the caller they stop at AVX-512."""
    script = "import tests, torch; torch.mm(torch.ones(8, 8).bfloat16(), torch.ones(8, 8).bfloat16())"
    for given, allowed in ((None, r"AVX-512|AVX2?"), ("AVX2", r"AVX2?|AVX2 with .*"), ("SSE41", r"SSE4\.1")):
        environment = {k: v for k, v in os.environ.items() if k != "ONEDNN_MAX_CPU_ISA"} | {"ONEDNN_VERBOSE": "1"}
        environment |= {"ONEDNN_MAX_CPU_ISA": given} if given else {}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        (isa,) = re.findall(r"^onednn_verbose.*,cpu,isa:(.*)$", done.stdout, re.M)
        assert "AMX" not in isa and re.match(allowed, isa.removeprefix("Intel ")), isa
