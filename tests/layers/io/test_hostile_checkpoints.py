"""What a stranger's checkpoint can hold ends in one clear error, soon and within 1.5 GB: files made by hand, every
number of a configuration, and random damage."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from dsa_layers.errors import CheckpointError, ConfigError
from dsa_layers.families.config import read_config
from dsa_layers.families.fields import NO_INFLUENCE
from dsa_layers.io import memory
from dsa_layers.io.directory import INDEX_NAME, SINGLE_NAME, Checkpoint
from dsa_layers.io.loading import load_model
from dsa_layers.io.weights import load_weights
from tests.layers.families.v4_checkpoints import write_published
from tests.layers.io.damage import JSON, VALUES, damaged, examples, torn
from tests.layers.io.hostile_files import CASES, VENDORED, tensor, write_config, write_safetensors
from tests.layers.io.stand_ins import changed as changed_checkpoint

ROOT = Path(__file__).parents[3]
WORKER = "tests.layers.io.hostile_worker"


@pytest.mark.slow
def test_hostile_files(tmp_path):
    """Loaded one after the other in a process that may take 1.5 GB more than it begins with."""
    for number, (damage, _) in enumerate(CASES.values()):
        directory = tmp_path / f"{number:03d}"
        directory.mkdir()
        write_config(directory)
        damage(directory)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", WORKER, str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, env=environment)
    shutil.rmtree(tmp_path)
    unit, *endings = [json.loads(line) for line in process.stdout.splitlines()]
    assert len(endings) == len(CASES), process.stderr
    wrong = []
    for (case, (_, expected)), (_, kind, message, seconds) in zip(CASES.items(), endings):
        refused = kind in ("CheckpointError", "ConfigError") and expected in message and len(message) < 4000
        if not refused or seconds > 20 * unit:
            wrong.append(f"{case}: {kind} after {seconds:.2f} s: {message[:400]}; expected: {expected}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["config.json", SINGLE_NAME, INDEX_NAME])
@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "circle"])
def test_what_is_no_file(tmp_path, name, kind):
    write_config(tmp_path)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)  # opening it would wait for a writer
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else name)
    with pytest.raises((CheckpointError, ConfigError), match=r"cannot be read|holds no") as error:
        load_model(tmp_path, progress=False)
    assert str(tmp_path) in str(error.value)


def test_a_large_header_that_is_right(tmp_path):
    """A quarter of what is accepted, with all that JSON allows."""
    names = [f'layers.{i}.\u00e9\\"{{}}[],' for i in range(2**16)]
    entries = [f'{json.dumps(name)} : {{"data_offsets":[0,0], "shape":[0, 5],\n"dtype":"BF16"}}' for name in names]
    entries[7:7] = ['"__metadata__" : {"a": "{\\"b\\": [1, \u20ac]}"}']
    write_safetensors(tmp_path / SINGLE_NAME, "{ " + " ,\n".join(entries) + " }  ")
    assert Checkpoint(tmp_path).tensors.keys() == {*names}


@pytest.mark.parametrize(("low", "high"), [(-1, 3), (0, 6)])
def test_tables_of_experts_that_are_not_there(tmp_path, low, high):
    """Routing takes the tables of hashed layers as row numbers, unseen."""
    (tmp_path / "right").mkdir()
    write_published(tmp_path / "right")
    name = "layers.0.ffn.gate.tid2eid"

    def change(tensors):
        tensors[name].zero_()
        tensors[name].view(-1)[[3, 5]] = torch.tensor([low, high])

    changed_checkpoint(tmp_path / "right", tmp_path / "wrong", change)
    expected = f"{name} names the experts {low} to {high}; the model has 0 to 5"
    with pytest.raises(CheckpointError, match=expected):
        load_model(tmp_path / "wrong", dequantize=True, progress=False)


# Configurations.


FAMILIES = ("deepseek_v32", "deepseek_v4_flash", "glm_5_2")
PUBLISHED = {name: json.loads((VENDORED / f"{name}_config.json").read_text()) for name in FAMILIES}
# What may be said by leaving something else out, and what refuses it then.
SAID_ELSEWHERE = {
    "dtype": "torch_dtype",
    "num_nextn_predict_layers": "compress_ratios",
    "first_k_dense_replace": "mlp_layer_types",
    "index_skip_topk_offset": "index_topk_freq",
    "rope_parameters": "rope_theta",
    "rope_theta": "rope_theta",
    "rope_scaling": "rope_scaling.rope_type",
    "type": "rope_scaling.rope_type",
    "quantization_config": "quantization_config.quant_method",
}


def fields_of(values, parents=()):
    for name, value in values.items():
        yield (*parents, name)
        if isinstance(value, dict):
            yield from fields_of(value, (*parents, name))


def changed(values, path, value):
    first, *rest = path
    return values | {first: changed(values[first], rest, value) if rest else value}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_a_config(tmp_path, family):
    """Each is right or refused by its name, whatever it holds."""
    cases = [(path, value) for path in fields_of(PUBLISHED[family]) for value in VALUES]
    for path, value in cases:
        (tmp_path / "config.json").write_text(json.dumps(changed(PUBLISHED[family], path, value)))
        try:
            read_config(tmp_path)
        except ConfigError as error:
            names = (".".join(path), SAID_ELSEWHERE.get(path[-1]))
            assert any(f"field '{name}' " in str(error) for name in names if name), (path, value)
            assert len(str(error)) < 2000
        else:
            unsaid = value in (None, [], {}) or path[0] in NO_INFLUENCE
            small = isinstance(value, int | float) and (0 <= value <= 1 or "theta" in path[-1])
            assert unsaid or small or value == [1], (path, value)


@pytest.mark.parametrize("target", ["nothing", "generation_config.json"])
def test_a_generation_config_that_is_a_link_to_nothing(tmp_path, target):
    """Without it, other tokens would end a sequence."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["deepseek_v32"]))
    (tmp_path / "generation_config.json").symlink_to(target)
    with pytest.raises(ConfigError, match=r"generation_config\.json: (no such file|cannot be read)"):
        read_config(tmp_path)


QUANTISED = {}
FP8_CACHE = {"dequantize": True, "kv_cache": "fp8"}


@pytest.mark.parametrize(
    ("family", "changes", "options", "expected"),
    [
        ("deepseek_v32", {"hidden_size": 7000}, QUANTISED, "'hidden_size' is 7000; accepted: a multiple of 128"),
        (
            "deepseek_v32",
            {"v_head_dim": 129, "num_attention_heads": 1, "num_key_value_heads": 1},
            QUANTISED,
            "'v_head_dim' is 129;",
        ),
        *(
            (
                family,
                {"index_head_dim": 96},
                QUANTISED,
                "'index_head_dim' is 96; accepted: 128, as quantised index keys",
            )
            for family in ("deepseek_v32", "deepseek_v4_flash")
        ),
        (
            "deepseek_v4_flash",
            {"o_groups": 64, "head_dim": 520},
            QUANTISED,
            "'o_groups' is 64, which makes a projection's input 520",
        ),
        ("deepseek_v4_flash", {"o_lora_rank": 100}, QUANTISED, "'o_lora_rank' is 100; accepted: a multiple of 128"),
        (
            "deepseek_v32",
            {"kv_lora_rank": 256},
            FP8_CACHE,
            "'kv_lora_rank' is 256; accepted: 512, as latents in FP8 have.*kv_cache='model'",
        ),
        (
            "glm_5_2",
            {"qk_rope_head_dim": 32, "qk_head_dim": 224},
            FP8_CACHE,
            "'qk_rope_head_dim' is 32; accepted: 64, as latents in.*kv_cache='model'",
        ),
        (
            "deepseek_v4_flash",
            {"head_dim": 256},
            FP8_CACHE,
            "'head_dim' is 256; accepted: 512, as latents in FP8 have.*kv_cache='model'",
        ),
    ],
)
def test_sizes_that_no_fp8_takes(tmp_path, family, changes, options, expected):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[family] | changes))
    with pytest.raises(ConfigError, match=expected):
        load_model(tmp_path, progress=False, **options)
    with pytest.raises(CheckpointError, match="holds no"):  # the next thing that is looked at
        load_model(tmp_path, dequantize=True, progress=False)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_5_2", "deepseek_v4_flash"])
@pytest.mark.parametrize("name", ["hidden_size", "moe_intermediate_size"])
def test_sizes_that_float_experts_do_not_take(tmp_path, family, name):
    def load(dtype, size):
        (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[family] | {name: size}))
        load_model(tmp_path, dtype=dtype, dequantize=True, progress=False)

    for dtype, size, multiple in ((torch.bfloat16, 20, 8), (torch.float16, 20, 8), (torch.float32, 18, 4)):
        with pytest.raises(ConfigError, match=f"'{name}' is {size}; accepted: a multiple of {multiple}: experts' rows"):
            load(dtype, size)
        with pytest.raises(CheckpointError, match="holds no"):  # the next thing that is looked at
            load(dtype, 3 * multiple)


# Random damage.


TENSORS = {"a.weight": torch.ones(3, 2), "b": torch.zeros(4, dtype=torch.int8), "c": torch.ones(2).bfloat16()}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch")


SAVED = save(TENSORS)
HEADER = SAVED[8 : 8 + int.from_bytes(SAVED[:8], "little")]
DATA = SAVED[8 + len(HEADER) :]
INDEX = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(TENSORS, "1.safetensors")}


def read_all(directory):
    """Every tensor, or CheckpointError. What the header's check lets through can be read."""
    try:
        checkpoint = Checkpoint(directory)
    except CheckpointError as error:
        assert len(str(error)) < 20_000
        return
    for name in checkpoint.tensors:
        assert checkpoint.read(name).nbytes == checkpoint.tensors[name].size


@examples
@given(damaged(json.loads(HEADER)) | torn(HEADER), st.integers(-8, 8) | st.just(0))
def test_damaged_headers(scratch, header, shift):
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = max(len(content) + shift, 0)
    (scratch / INDEX_NAME).unlink(missing_ok=True)
    (scratch / SINGLE_NAME).write_bytes(length.to_bytes(8, "little") + content + DATA)
    read_all(scratch)


@examples
@given(damaged(INDEX) | torn(json.dumps(INDEX).encode()))
def test_damaged_indexes(scratch, index):
    (scratch / SINGLE_NAME).unlink(missing_ok=True)
    (scratch / "1.safetensors").write_bytes(SAVED)
    (scratch / INDEX_NAME).write_bytes(index if isinstance(index, bytes) else json.dumps(index).encode())
    read_all(scratch)


SIZES = st.sampled_from(
    [*VALUES, 1, 2, 3, 4, 7, 64, 128, 192, 256, 257, 2**12, 2**13, 2**20, 2**24, 2**31 - 1, 1e-30, 1e30]
)


@pytest.mark.parametrize("family", FAMILIES)
@examples
@given(data=st.data())
def test_damaged_configs(scratch, family, data):
    """Read, and a model made of what is accepted, of which the files then hold next to nothing."""
    (scratch / INDEX_NAME).unlink(missing_ok=True)
    paths = data.draw(
        st.lists(st.sampled_from(list(fields_of(PUBLISHED[family]))), min_size=1, max_size=4, unique=True)
    )
    fields = PUBLISHED[family] | {"num_hidden_layers": 2}
    for path in paths:
        try:
            fields = changed(fields, path, data.draw(SIZES | JSON))
        except (KeyError, TypeError):
            continue  # inside of what was replaced before
    layers = {f"layers.{i}.x": tensor("I8", [1], [i, i + 1]) for i in range(2)}
    write_safetensors(scratch / SINGLE_NAME, layers, 2)
    (scratch / "config.json").write_text(json.dumps(fields))
    for dequantize in (False, True):
        with pytest.raises((ConfigError, CheckpointError)):
            load_model(scratch, dequantize=dequantize, progress=False)


def test_a_model_beyond_the_memory(tmp_path):
    """A file of zeros takes no room on the disk, and would take all of the memory."""
    rows = 10**13
    write_safetensors(tmp_path / SINGLE_NAME, {"a": tensor("I8", [rows], [0, rows])}, rows)
    model = torch.nn.Module()
    model.register_buffer("a", torch.empty(rows, dtype=torch.int8, device="meta"))
    with pytest.raises(CheckpointError, match=r"the model takes 10000\.0 GB; the memory of cpu is [\d.]+ GB"):
        load_weights(model, tmp_path, progress=False)
    assert model.a.is_meta


@pytest.mark.parametrize(
    ("totals", "limit", "expected"),
    [
        ("MemTotal: 100 kB\nSwapTotal: 20 kB\n", None, 120 * 1024),
        ("MemTotal: 100 kB\nSwapTotal: 20 kB\n", "max\n", 120 * 1024),
        ("MemTotal: 100 kB\nSwapTotal: 20 kB\n", "4096\n", 4096),
        ("something else", "4096\n", None),
        (None, None, None),
    ],
)
def test_memory_of_a_machine(tmp_path, monkeypatch, totals, limit, expected):
    for name, content in (("_TOTALS", totals), ("_LIMIT", limit)):
        monkeypatch.setattr(memory, name, tmp_path / name)
        if content is not None:
            (tmp_path / name).write_text(content)
    assert memory.memory_of("cpu") == expected
    assert memory.memory_of("meta") is None
