"""Prompts in the formats of DeepSeek's releases, which have no Jinja template."""

import copy
import hashlib
import json
import os
import re
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models

from dsa_layers.io.chat_template import FORMATS, format_source, render
from dsa_layers.io.tokenizer import Tokenizer, TokenizerError
from tests.layers.io import chat_examples as examples
from tests.layers.io.chat_examples import ASSISTANT, BOS, CALLED, EOS, EXAMPLES, QUESTION, TOOLS, USER, call, says

MARKS = (BOS, EOS, USER, ASSISTANT)


@pytest.fixture
def make(tmp_path):
    def tokenizer(model_type, tokens=MARKS, **config):
        made = tokenizers.Tokenizer(models.BPE())
        made.add_special_tokens(list(tokens))
        made.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        return Tokenizer(tmp_path)

    return tokenizer


@pytest.mark.parametrize(("model_type", "messages", "arguments", "prompt"), EXAMPLES)
def test_prompts_are_those_written_by_hand(make, model_type, messages, arguments, prompt):
    assert make(model_type).apply_chat_template(messages, **arguments) == BOS + prompt


def test_the_texts_that_models_were_trained_with_are_unchanged():
    texts = (examples.V32_TEXT, examples.V4_TEXT, examples.MAX_EFFORT)
    texts = (text.replace("{{ schemas(tools) }}", "SCHEMAS") for text in texts)
    digests = [hashlib.sha256(text.encode()).hexdigest()[:8] for text in texts]
    assert digests == ["79b785ce", "2a316be1", "f7a24f3b"]


BOTH = [
    ([], {}, "messages: must hold a message, got none"),
    ("Q", {}, "messages: must be a list, got 'Q'"),
    (["Q"], {}, "messages: each must have a role of system, developer, user, assistant, tool"),
    ([says("bot", "Q")], {}, "messages: each must have a role of system"),
    ([says("user", None)], {}, "content: must be a string or a list of texts, got {"),
    ([says("user", [{"type": "image"}])], {}, "content: must be text, got {'type': 'image'}"),
    (QUESTION, {"tools": [{"name": "f"}]}, 'tools: each must be {"type": "function", "function": ...}, got {'),
    (QUESTION, {"think": True}, "think: is no variable of the chat template; accepted: drop_thinking, enable_thinking"),
    (QUESTION, {"thinking": "no"}, "thinking: must be true or false, got no"),
    ([says("assistant", "", tool_calls=[call(1, "")])], {}, "tool_calls: each must have a function with a name"),
]


@pytest.mark.parametrize(
    ("model_type", "messages", "arguments", "problem"),
    [
        *((model_type, *case) for model_type in FORMATS for case in BOTH),
        ("deepseek_v32", CALLED[3:], {}, "messages: a tool's result must follow the assistant's message"),
        ("deepseek_v32", [*CALLED, says("tool", "3")], {}, "that calls it, got result 3 of 2 calls"),
        ("deepseek_v32", QUESTION, {"reasoning_effort": "max"}, "reasoning_effort: is no variable of the chat templ"),
        ("deepseek_v4", QUESTION, {"reasoning_effort": "low"}, "must be one of none, high, max, got low"),
    ],
)
def test_a_format_refuses_what_it_cannot_write(make, model_type, messages, arguments, problem):
    with pytest.raises(TokenizerError, match=re.escape(problem)):
        make(model_type).apply_chat_template(messages, **arguments)


def test_a_template_goes_before_the_format(make):
    tokenizer = make("deepseek_v32", chat_template="{{ tools[0] }} {{ mode }} {{ documents is none }}")
    assert tokenizer.apply_chat_template(QUESTION, tools=["f"], mode="fast") == "f fast True"


def test_a_checkpoint_has_a_format_by_its_model_type_and_its_tokens(make):
    assert make("deepseek_v32").has_chat_template
    assert not make("deepseek_v32", MARKS[:3]).has_chat_template
    assert not make("glm_moe_dsa").has_chat_template
    assert not make([]).has_chat_template


TEXT = st.text("ab é\n<", max_size=3)
TEXT_OR_NOT = TEXT | st.none()
CALLS = st.lists(st.dictionaries(TEXT, TEXT | st.integers() | st.lists(TEXT, max_size=2), max_size=2), max_size=3)
EXTRAS = st.fixed_dictionaries({}, optional={"tools": st.just(TOOLS), "response_format": st.just({"type": "é"})})
V32_FILE = "sglang/srt/entrypoints/openai/encoding_dsv32.py"
V4_FILE = "vllm/tokenizers/deepseek_v4_encoding.py"


def encoder(path, thinking, drop, **options):
    """Return `encode_messages` of SGLang's or vLLM's file `path`, or skip the test (docs/reference/engines.md)."""
    folders = [*os.environ.get("DSA_SGLANG_FILES", "").split(os.pathsep), *sys.path]
    file = next((file for folder in folders if (file := Path(folder, path)).is_file()), None)
    if file is None:
        pytest.skip(f"no folder holds {path}")
    encode = runpy.run_path(str(file))["encode_messages"]
    return partial(encode, thinking_mode="thinking" if thinking else "chat", drop_thinking=drop, **options)


@st.composite
def conversations(draw, *, reminders: bool):
    messages = [says("system", draw(TEXT_OR_NOT), **draw(EXTRAS))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        if reminders and draw(st.booleans()):
            messages.append(says("latest_reminder", draw(TEXT)))
        developer = says("developer", draw(TEXT) + "D", **draw(EXTRAS))
        messages.append(developer if draw(st.integers(0, 3)) == 0 else says("user", draw(TEXT)))
        for arguments in draw(st.lists(CALLS, max_size=2)):
            calls = [call(f"f{i}", arguments, f"c{i}") for i, arguments in enumerate(arguments)]
            reasoning = draw(TEXT_OR_NOT)
            fields = {"reasoning_content": reasoning, "reasoning": reasoning, "tool_calls": calls}
            messages.append(says("assistant", draw(TEXT_OR_NOT), **fields))
            order = draw(st.permutations(range(len(calls))))
            messages += [says("tool", draw(TEXT), tool_call_id=f"c{i}") for i in order]
    return messages


def compare(name, encode, messages, **options):
    """Check that the format `name` writes the encoder's prompt. Ignore messages for which the encoder raises."""
    try:
        expected = encode(copy.deepcopy(messages))
    except Exception:
        return
    variables = {"messages": messages, "tools": None, "add_generation_prompt": True}
    assert render(FORMATS[name], format_source(FORMATS[name]), variables, options) == expected


@settings(max_examples=300, deadline=None)
@given(messages=conversations(reminders=False), thinking=st.booleans(), drop=st.booleans())
def test_deepseek_v32_equals_its_encoder(messages, thinking, drop):
    compare("deepseek_v32", encoder(V32_FILE, thinking, drop), messages, thinking=thinking, drop_thinking=drop)


@settings(max_examples=300, deadline=None)
@given(messages=conversations(reminders=True), thinking=st.booleans(), drop=st.booleans(), most=st.booleans())
def test_deepseek_v4_equals_its_encoder(messages, thinking, drop, most):
    """The reasoning_effort "high" of vLLM's encoder is our format's "max", and its "low" is our "high"."""
    encode = encoder(V4_FILE, thinking, drop, reasoning_effort="high" if most else "low")
    options = {"thinking": thinking, "drop_thinking": drop, "reasoning_effort": "max" if most else "high"}
    compare("deepseek_v4", encode, messages, **options)
