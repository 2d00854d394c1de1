"""Damage to files of checkpoints: hostile values, and random changes of their JSON and of their bytes.

`make test` draws the same few examples each time; DSA_HOSTILE_EXAMPLES=4000 draws 4000, and others each time.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4302338560\n"

# What a number, or any other value, can be in JSON.
HUGE = 10**400
VALUES = [0, -1, 10**18, -(10**18), HUGE, -HUGE, math.nan, math.inf, -math.inf, 0.5, 1e-320, True, "8", None]
VALUES += [[], {}, [1], {"a": 1}, [[[[1]]]], "x" * 100_000]


def write_safetensors(path: Path, header: bytes | str | dict[str, Any], zeros: int = 0) -> None:
    """Write a file with this header and so many zeros as data, which take no room on the disk."""
    header = json.dumps(header) if isinstance(header, dict) else header
    content = header.encode() if isinstance(header, str) else header
    path.write_bytes(len(content).to_bytes(8, "little") + content)
    os.truncate(path, 8 + len(content) + zeros)


EXAMPLES = int(os.environ.get("DSA_HOSTILE_EXAMPLES", "60"))

examples = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES <= 100,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

LEAVES = st.sampled_from([*VALUES, 1, 2, 3, 4, 8, 24, "F32", "I8", "a.weight", 2**31, 2**63, 2**64])
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@st.composite
def damaged(draw, value):
    """A JSON value, or text, in which something was replaced, removed, doubled or added."""
    for _ in range(draw(st.integers(1, 3))):
        value = _damage(draw, value)
    return value


def _damage(draw, value):
    inside = isinstance(value, dict | list) and value and draw(st.integers(0, 4))
    if not inside:
        return draw(JSON)
    if isinstance(value, list):
        at = draw(st.integers(0, len(value) - 1))
        middle = draw(st.sampled_from([[], [_damage(draw, value[at])], [value[at]] * 2]))
        return [*value[:at], *middle, *value[at + 1 :]]
    name = draw(st.sampled_from(sorted(value)))
    kind = draw(st.sampled_from(["inside", "inside", "inside", "removed", "renamed", "added"]))
    if kind == "inside":
        return value | {name: _damage(draw, value[name])}
    rest = {key: item for key, item in value.items() if key != name or kind == "added"}
    return rest if kind == "removed" else rest | {draw(st.text(max_size=8)): value[name]}


@st.composite
def torn(draw, content):
    """Bytes in which some were replaced, removed or added."""
    content = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        length = draw(st.integers(0, 3))
        content[at : at + length] = draw(
            st.binary(max_size=4) | st.sampled_from([b"{", b"[", b'"', b",", b"}", b"9" * 30])
        )
    return bytes(content)
