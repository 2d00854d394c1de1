"""Checkpoints that a stranger could have written: what each does to a directory, and what the refusal must say."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsa_layers.families.published import VENDORED
from dsa_layers.io.directory import INDEX_NAME, SINGLE_NAME
from tests.layers.io.damage import HUGE, LFS_POINTER

CONFIG = json.loads((VENDORED / "deepseek_v32_config.json").read_text()) | {
    "num_hidden_layers": 1,
    "quantization_config": None,
}
CONFIG |= {"first_k_dense_replace": 0, "num_nextn_predict_layers": 0}

DEEP = "[" * 100_000

Case = Callable[[Path], Any]


def write_config(directory: Path, **fields: Any) -> None:
    (directory / "config.json").write_text(json.dumps(CONFIG | fields))


def write_safetensors(path: Path, header: bytes | str | dict[str, Any], data: int | bytes = 0) -> None:
    """data: its bytes, or how many zeros, which take no room on the disk."""
    if isinstance(header, dict):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode()
    content = data if isinstance(data, bytes) else b""
    path.write_bytes(len(header).to_bytes(8, "little") + header + content)
    if isinstance(data, int):
        os.truncate(path, 8 + len(header) + data)


def tensor(dtype: Any = "F32", shape: Any = (1,), data_offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets}


def header(content: bytes | str | dict[str, Any], data: int = 4) -> Case:
    return lambda directory: write_safetensors(directory / SINGLE_NAME, content, data)


def index(content: bytes | str | dict[str, Any]) -> Case:
    if isinstance(content, dict):
        content = json.dumps(content)
    if isinstance(content, str):
        content = content.encode()
    return lambda directory: (directory / INDEX_NAME).write_bytes(content)


def config(**fields: Any) -> Case:
    """Of a checkpoint with one small tensor of each of 256 layers."""

    def write(directory: Path) -> None:
        write_config(directory, **fields)
        names = {f"model.layers.{i}.input_layernorm.weight": tensor(shape=[0], data_offsets=[0, 0]) for i in range(256)}
        write_safetensors(directory / SINGLE_NAME, names)

    return write


def file(name: str, content: bytes) -> Case:
    return lambda directory: (directory / name).write_bytes(content)


def sparse(name: str, size: int) -> Case:
    """A file of zeros, which take no room on the disk."""

    def write(directory: Path) -> None:
        (directory / name).touch()
        os.truncate(directory / name, size)

    return write


def announced(length: int, size: int) -> Case:
    """A safetensors file of `size` bytes, all zero but for the length of its header."""

    def write(directory: Path) -> None:
        (directory / SINGLE_NAME).write_bytes(length.to_bytes(8, "little"))
        os.truncate(directory / SINGLE_NAME, size)

    return write


def experts(shape: list[int], data: int = 0, dtype: str = "BF16") -> dict[str, Any]:
    return {"model.layers.0.mlp.experts.gate_up_proj": tensor(dtype, shape, [0, data])}


def repeated(entry: str, size: int) -> str:
    """A header or index that opens with `entry` again and again, `size` characters in all."""
    return entry * (size // len(entry))


def linked(count: int, size: int) -> Case:
    """An index of `count` files, all of them links to one whose header has `size` bytes and holds nothing."""

    def write(directory: Path) -> None:
        write_safetensors(directory / "1", b"{}" + b" " * (size - 2))
        for i in range(count):
            (directory / f"{i}.safetensors").symlink_to("1")
        index({"weight_map": {str(i): f"{i}.safetensors" for i in range(count)}})(directory)

    return write


SHAPES = [
    [-1],
    [2, -2],
    [True],
    [1.0],
    [1e0],
    ["1"],
    [None],
    [[1]],
    "1",
    1,
    None,
    [2**63],
    [2**62, 4],
    [HUGE],
    [math.nan],
]
SHAPES += [[10**18, 10**18, 0], [0, 2**62, 2**62], [0] + [1] * 100]
DTYPES = [[], ["F32"], None, 5, True, "F99", "", "f32", "F32\0"]
OFFSETS = [
    [False, 4],
    [0, True],
    [0.0, 4],
    [0, 4.0],
    [-4, 0],
    [4, 0],
    [0, HUGE],
    [0, 10**18],
    [0],
    [0, 4, 8],
    [[0, 4]],
    [],
]
OFFSETS += ["04", None, 4, ["0", "4"], [0, None], [math.inf, math.inf]]

NO_HEADER = "model.safetensors: not a safetensors file, or cut short at "

# name -> (what it does to a directory that has a good config.json, a part of the refusal)
CASES: dict[str, tuple[Case, str]] = {
    # The header's length and form.
    "header of 2^63 bytes": (announced(2**63, 1000), "announce a header of 9223372036854775808 bytes"),
    "header of 32 MB and a byte": (announced(2**25 + 1, 10**9), "accepted: at most 33554432"),
    "header of 32 MB of zeros": (announced(2**25, 10**9), NO_HEADER),
    "header of 30 MB of spaces": (header("{" + " " * (3 * 10**7)), NO_HEADER),
    "header of 10 MB of lists": (header('{"a":[' + repeated("[],", 10**7)), NO_HEADER),
    "metadata of 10 MB of lists": (header('{"__metadata__":{"a":[' + repeated("[],", 10**7)), NO_HEADER),
    "empty file": (file(SINGLE_NAME, b""), "truncated: 0 bytes"),
    "web page": (file(SINGLE_NAME, b"<!DOCTYPE html><html>" * 100), "announce a header of"),
    "git-LFS pointer": (file(SINGLE_NAME, LFS_POINTER), "model.safetensors: is a git-LFS pointer"),
    "nested header": (header(DEEP), NO_HEADER),
    "nested entry": (header('{"a":' + DEEP), NO_HEADER),
    "nested objects": (header('{"a":' * 100_000), NO_HEADER),
    "nested metadata": (header('{"__metadata__":' + DEEP), NO_HEADER),
    "30 MB of dimensions": (
        header('{"a":{"dtype":"I8","shape":[0%s],"data_offsets":[0,0]}}' % (",1" * 15 * 10**6), 0),
        "a has 15000001 dimensions; accepted: at most 16",
    ),
    "5 headers of 30 MB": (linked(5, 3 * 10**7), "1.safetensors: the files' headers have more than 33554432 bytes"),
    "name of no character": (header({"": tensor()}), "the tensor name ''"),
    "name of control characters": (header({"\x1b[2J": tensor()}), "the tensor name '\\x1b[2J'"),
    "name of half a character": (header({"\ud800": tensor()}), NO_HEADER),
    "name of a megabyte": (header({"a" * 2**20: tensor()}), "the tensor name 'aaaa"),
    "name that is no UTF-8": (header(b'{"\xff":{}}'), NO_HEADER),
    "fields missing": (header({"a": {}}), NO_HEADER),
    "entry that is a list": (header({"a": []}), NO_HEADER),
    "header that is a list": (header("[]"), NO_HEADER),
    "overlapping tensors": (header({"a": tensor(), "b": tensor()}), NO_HEADER),
    "data beyond the end": (header({"a": tensor(shape=[100], data_offsets=[0, 400])}), NO_HEADER),
    "300,000 tensors": (
        header({str(i): tensor("I8", [0], [0, 0]) for i in range(300_000)}, 0),
        "holds 300000 tensors; accepted: at most 262144",
    ),
    # Experts: announced by few bytes.
    "10^9 experts in 122 bytes": (header(experts([10**9, 0, 256]), 0), "has shape [1000000000, 0, 256]"),
    "10^9 experts of a byte": (
        header(experts([10**9, 2, 1], 2 * 10**9, "I8"), 2 * 10**9),
        "1000000000 experts; the model has 256",
    ),
    "experts of no dimension": (header(experts([256], 256, "I8"), 256), "experts in one tensor are"),
    # The index.
    "index in git-LFS": (index(LFS_POINTER), f"{INDEX_NAME}: is a git-LFS pointer"),
    "nested index": (index(DEEP), "nested too deeply"),
    "nested weight_map": (index('{"weight_map":{"a":' + DEEP), "nested too deeply"),
    "index of 10 MB of lists": (index('{"weight_map":[' + repeated("[],", 10**7)), "holds too many values"),
    "index of 40 MB": (sparse(INDEX_NAME, 4 * 10**7), "has 40000000 bytes; accepted: at most"),
    "index that is no UTF-8": (index(b'{"\xff"'), "cannot be read"),
    "index of a number of 10^5 digits": (index("9" * 10**5), "not valid JSON: Exceeds the limit"),
    "index without files": (index({"weight_map": None}), 'expected {"weight_map": {tensor: file, ...}}'),
    "index of half a character": (index({"weight_map": {"\ud800": "a"}}), "the tensor name '\\ud800'"),
    "a thousand missing files": (
        index({"weight_map": {str(i): f"{i}.safetensors" for i in range(1000)}}),
        "1000 problems, nothing was loaded:\n  0.safetensors: missing",
    ),
}
CASES |= {f"shape {i}": (header({"a": tensor(shape=shape)}), NO_HEADER) for i, shape in enumerate(SHAPES)}
CASES |= {f"dtype {i}": (header({"a": tensor(dtype)}), NO_HEADER) for i, dtype in enumerate(DTYPES)}
CASES |= {f"offsets {i}": (header({"a": tensor(data_offsets=at)}), NO_HEADER) for i, at in enumerate(OFFSETS)}
CASES |= {
    f"index names {name[:20]!r}": (index({"weight_map": {"a": name}}), "is not the name of a file in this directory")
    for name in ("", ".", "..", "../a", "/etc/passwd", "a/b", "a\\b", "a\0b", "\x1b[2J", "\ud800", "a" * 256)
}
CASES["100,000 missing files"] = (
    index({"weight_map": {str(i): f"{i}.safetensors" for i in range(100_000)}}),
    "names 100000 files; accepted: at most 4096",
)
CASES["index of 10^6 tensors in one file"] = (
    index('{"weight_map":{' + ",".join(f'"{i}":"missing"' for i in range(10**6)) + "}}"),
    "holds too many values",
)
CASES |= {
    f"index gives {i} as a file": (index({"weight_map": {"a": value}}), "weight_map gives a the file ")
    for i, value in enumerate((1, True, None, [], {}, ["a"], HUGE, math.nan))
}

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
TOO_MANY = "is made of more than 17408 tensors; the files hold 256"
BIG = {"n_routed_experts": 2**13, "n_group": 1, "topk_group": 1}
CASES |= {
    "config in git-LFS": (file("config.json", LFS_POINTER), "config.json: is a git-LFS pointer"),
    "nested config": (file("config.json", DEEP.encode()), "nested too deeply"),
    "nested field": (file("config.json", b'{"a":' * 100_000), "nested too deeply"),
    "config of 1 TB": (sparse("config.json", 2**40), "accepted: at most 1048576"),
    "config of lists": (file("config.json", b'{"a":[' + b"[]," * 340_000), "not valid JSON"),
    "config with a field twice": (file("config.json", b'{"a":1,"a":2}'), "'a' is listed twice in one JSON object"),
    "generation config in git-LFS": (
        file("generation_config.json", LFS_POINTER),
        "generation_config.json: is a git-LFS",
    ),
    # Each number is small enough. Together they are more than the files hold.
    "layers that are not there": (config(num_hidden_layers=256, n_shared_experts=1024), TOO_MANY),
    "experts by layers": (config(num_hidden_layers=256, **BIG), TOO_MANY),
    "everything at its most": (
        config(
            num_hidden_layers=256,
            hidden_size=2**20,
            vocab_size=2**24,
            moe_intermediate_size=2**20,
            num_attention_heads=2**12,
            num_key_value_heads=None,
            qk_nope_head_dim=2**20,
            v_head_dim=2**20,
            **BIG,
        ),
        TOO_MANY,
    ),
    "config of many token ids": (
        config(bos_token_id=[1] * 100_000),
        "'bos_token_id' is [1, 1, 1, 1, 1, 1, 1, 1, ...]; accepted: one token",
    ),
    "sizes that FP8 cannot cut": (
        config(quantization_config=FP8, hidden_size=100),
        "field 'hidden_size' is 100; accepted: a multiple of 128",
    ),
}
CASES |= {
    f"{count} layers": (
        lambda directory, count=count: write_config(directory, num_hidden_layers=count),
        "num_hidden_layers",
    )
    for count in (10**18, HUGE, 257)
}
