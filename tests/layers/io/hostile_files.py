"""Checkpoints that a stranger could have written: what each does to a directory, and what the refusal must say."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsa_layers.families.published import VENDORED
from dsa_layers.io.directory import INDEX_NAME, SINGLE_NAME

CONFIG = json.loads((VENDORED / "deepseek_v32_config.json").read_text()) | {
    "num_hidden_layers": 1,
    "quantization_config": None,
}
CONFIG |= {"first_k_dense_replace": 0, "num_nextn_predict_layers": 0}

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4302338560\n"
DEEP = "[" * 100_000

# What a number, or anything else that is not what was meant, can be in JSON.
HUGE = 10**400
VALUES = [0, -1, 10**18, -(10**18), HUGE, -HUGE, math.nan, math.inf, -math.inf, 0.5, 1e-320, True, "8", None]
VALUES += [[], {}, [1], {"a": 1}, [[[[1]]]], "x" * 100_000]

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

# name -> (what it does to a directory that has a good config.json, a part of the refusal)
CASES: dict[str, tuple[Case, str]] = {
    # The header's length and form.
    "header of 2^63 bytes": (announced(2**63, 1000), "announce a header of 9223372036854775808 bytes"),
    "header of 100 MB and a byte": (announced(10**8 + 1, 10**9), "accepted: at most 100000000"),
    "header of 100 MB of zeros": (announced(10**8, 10**9), "byte 0 of its header should begin a JSON object"),
    "header of 10 MB of lists": (header('{"a":[' + repeated("[],", 10**7)), "byte 5 of its header"),
    "header of 10 MB of numbers": (header('{"a":{"shape":[' + repeated("0,", 10**7)), "byte 5 of its header"),
    "header of 10 MB of metadata": (header('{"__metadata__":{"a":"' + "x" * 10**7), "should begin metadata"),
    "metadata of 10 MB of lists": (header('{"__metadata__":{"a":[' + repeated("[],", 10**7)), "should begin metadata"),
    "header of 10 MB of emoji": (
        header('{"__metadata__":{"a":"' + "\U0001f600" * 25 * 10**5),
        "should begin metadata",
    ),
    "empty file": (file(SINGLE_NAME, b""), "truncated: 0 bytes"),
    "web page": (file(SINGLE_NAME, b"<!DOCTYPE html><html>" * 100), "announce a header of"),
    "git-LFS pointer": (file(SINGLE_NAME, LFS_POINTER), "model.safetensors: is a git-LFS pointer"),
    "nested header": (header(DEEP), "byte 0 of its header should begin a JSON object"),
    "nested entry": (header('{"a":' + DEEP), "byte 5 of its header should begin a tensor's fields"),
    "nested objects": (header('{"a":' * 100_000), "byte 5 of its header should begin a tensor's fields"),
    "nested shape": (
        header('{"a":{"dtype":"F32","shape":' + "[" * 1500 + "}"),
        "byte 1 of its header should begin JSON",
    ),
    "nested metadata": (header('{"__metadata__":' + DEEP), "should begin metadata"),
    "metadata a million times": (
        header("{" + repeated('"__metadata__":{},', 2 * 10**7)),
        "__metadata__ is there twice",
    ),
    "100 MB of spaces": (header("{" + " " * (10**8 - 1)), "should begin a tensor's name"),
    "100 MB of dimensions": (
        header("{" + repeated('"a":{"dtype":"I8","shape":[0%s],"data_offsets":[0,0]},' % (",1" * 900), 10**8)),
        "accepted: a list of up to 16 integers",
    ),
    "100 headers of 100 MB": (linked(100, 10**8), "1.safetensors: its header has 100000000 bytes, and the files'"),
    "metadata of lists": (
        header({"__metadata__": {"a": []}}),
        "__metadata__ is {'a': []}; accepted: an object of strings",
    ),
    "metadata that is a list": (header({"__metadata__": []}), "__metadata__ is []"),
    "name of no character": (header({"": tensor()}), "the tensor name ''"),
    "name of control characters": (header({"\x1b[2J": tensor()}), "the tensor name '\\x1b[2J'"),
    "name of half a character": (header({"\ud800": tensor()}), "the tensor name '\\ud800'"),
    "name of a megabyte": (header({"a" * 2**20: tensor()}), "byte 1 of its header should begin a tensor's name"),
    "name that is no UTF-8": (header(b'{"\xff":{}}'), "byte 1 of its header should begin JSON; UnicodeDecodeError"),
    "name that comes twice": (header('{"a":%s,"a":%s}' % ((json.dumps(tensor()),) * 2)), "a is there twice"),
    "field that comes twice": (
        header('{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}'),
        "a has the fields ['dtype', 'shape', 'data_offsets']",
    ),
    "field too many": (header({"a": tensor() | {"b": 1}}), "a has the fields"),
    "fields missing": (header({"a": {}}), "a has the fields []"),
    "entry that is a list": (header({"a": []}), "byte 6 of its header should begin a tensor's fields"),
    "header that is a list": (header("[]"), "byte 0 of its header should begin a JSON object"),
    "bytes behind the header": (header("{} {}"), "byte 2 of its header should begin nothing behind the JSON object"),
    "overlapping tensors": (header({"a": tensor(), "b": tensor()}), "b starts at byte 0 of the data, expected 4"),
    "data beyond the end": (header({"a": tensor(shape=[100], data_offsets=[0, 400])}), "truncated: "),
    "300,000 tensors": (
        header({str(i): tensor("I8", [0], [0, 0]) for i in range(300_000)}, 0),
        "holds more than 262144 tensors",
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
CASES |= {f"shape {i}": (header({"a": tensor(shape=shape)}), "a has shape ") for i, shape in enumerate(SHAPES)}
CASES |= {f"dtype {i}": (header({"a": tensor(dtype)}), "a has dtype ") for i, dtype in enumerate(DTYPES)}
CASES |= {
    f"offsets {i}": (header({"a": tensor(data_offsets=at)}), "model.safetensors: a ") for i, at in enumerate(OFFSETS)
}
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
