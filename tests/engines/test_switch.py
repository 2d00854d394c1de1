"""The environment variables that switch the engines' plugins on, and the line that is logged if a plugin declines."""

import logging

import pytest

from dsa_engines import switch

PARTS = {"scores", "topk", "attention", "select", "prefill", "queries", "routing", "experts", "linear"}


@pytest.fixture
def environment(monkeypatch):
    """Return a function that sets DSA_ENGINE and DSA_ENGINE_OPS. None unsets a variable."""

    def change(engine=None, ops=None):
        for name, value in {"DSA_ENGINE": engine, "DSA_ENGINE_OPS": ops}.items():
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)

    return change


@pytest.mark.parametrize("engine", [None, "", "0", "true", " 1"])
def test_off_unless_it_is_1(environment, engine):
    environment(engine, "no such word, which nobody reads")
    assert switch.enabled_ops("vllm") == frozenset()


@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        (None, PARTS),
        ("", PARTS),
        ("topk, attention", {"topk", "attention"}),
        ("attention,,attention,", {"attention"}),
        *((part, {part}) for part in sorted(PARTS)),
    ],
)
def test_ops(environment, ops, expected):
    environment("1", ops)
    assert switch.enabled_ops("vllm") == expected


def test_an_engine_has_its_own_parts(environment):
    environment("1", "scores,select")
    with pytest.raises(
        ValueError,
        match=r"^DSA_ENGINE_OPS: got select; accepted for sglang are attention, experts, linear, scores, topk$",
    ):
        switch.enabled_ops("sglang")
    environment("1")
    assert switch.enabled_ops("sglang") == {"attention", "experts", "linear", "scores", "topk"}


def test_an_unknown_word_is_named_with_those_that_are_known(environment):
    environment("1", "scores,top-k,Attention")
    message = rf"^DSA_ENGINE_OPS: got Attention, top-k; accepted for vllm are {', '.join(sorted(PARTS))}$"
    with pytest.raises(ValueError, match=message):
        switch.enabled_ops("vllm")


def test_declined_is_one_line(caplog):
    with caplog.at_level(logging.WARNING):
        switch.declined("vllm", "something\n  is missing")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "dsa: vllm: something is missing; the engine's own kernels stay"


@pytest.mark.parametrize("installed", ["0.33.0", "0.33.0+cu130", "0.34.1"])
def test_tested_versions(installed):
    assert switch.is_tested(installed, ("0.33.0", "0.34.1"))


@pytest.mark.parametrize("installed", ["0.33.1", "0.33", "0.33.0rc1", "dev", ""])
def test_other_versions(installed):
    assert not switch.is_tested(installed, ("0.33.0",))
