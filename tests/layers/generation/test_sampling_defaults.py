"""What generation_config.json says of sampling."""

import json

import pytest

from dsa_layers import SHIPPED_MODEL
from dsa_layers.errors import ConfigError
from dsa_layers.generation.sampling_defaults import sampling_defaults


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (None, {}),
        ({"eos_token_id": 1}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95}, {"temperature": 0.6, "top_p": 0.95}),
        ({"do_sample": True, "top_k": 20}, {"temperature": 1.0, "top_k": 20}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.95}, {"temperature": 0.0, "top_p": 0.95}),
        ({"temperature": 0.6}, {"temperature": 0.6}),
        ({"do_sample": None, "temperature": None, "top_p": 0.9}, {"top_p": 0.9}),
    ],
)
def test_values(tmp_path, fields, expected):
    if fields is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    assert sampling_defaults(tmp_path) == expected


def test_the_shipped_model_samples():
    assert sampling_defaults(SHIPPED_MODEL) == {"temperature": 0.8, "top_p": 0.95}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"do_sample": 1}', "field 'do_sample' is 1; accepted: true, false or null"),
        ('{"temperature": "hot"}', "field temperature: must be a number, got 'hot'"),
        ('{"temperature": true}', "field temperature: must be a number, got true"),
        ('{"temperature": -1}', "field temperature: must be a finite number of at least 0, got -1.0"),
        ('{"top_p": 0}', "field top_p: must be above 0 and at most 1, got 0.0"),
        ('{"top_k": 2.5}', "field top_k: must be an integer, got 2.5"),
        ("[]", "must hold a JSON object, got []"),
        ("{", "not valid JSON"),
    ],
)
def test_nonsense(tmp_path, content, problem):
    path = tmp_path / "generation_config.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        sampling_defaults(tmp_path)
    assert str(caught.value).startswith(f"{path}: {problem}")


def test_a_link_to_nothing(tmp_path):
    (tmp_path / "generation_config.json").symlink_to("nothing")
    with pytest.raises(ConfigError, match=r"generation_config\.json: no such file"):
        sampling_defaults(tmp_path)
