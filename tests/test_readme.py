"""The README's example runs as it stands there."""

import re
from pathlib import Path

TEXT = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    names = {}
    exec(code, names)
    assert names["q"].shape == (96, 512) and names["scale"].shape == (96, 4)
    assert names["y"].shape == (96, 512) and names["y"].isfinite().all()


def test_every_path_and_command_exists():
    root = Path(__file__).parent.parent
    for path in re.findall(r"^\| `([\w/.-]+)` \|", TEXT, re.M):
        if "/" in path:
            assert (root / path).exists(), path
    targets = set(re.findall(r"^([a-z]+):", (root / "Makefile").read_text(), re.M))
    assert set(re.findall(r"^make (\w+)", TEXT, re.M)) <= targets
