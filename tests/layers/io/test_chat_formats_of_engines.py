"""Our chat formats equal the encoders that engines took over from DeepSeek's releases.

Skipped unless DSA_SGLANG_FILES (docs/reference/engines.md) or the path has folders with the .py files of SGLang, and of
vLLM.
"""

import copy
import os
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_layers.io.chat_formats import FORMATS
from tests.layers.io.chat_examples import TOOLS, call, says

TEXT = st.text("ab é\n<", max_size=3)
TEXT_OR_NOT = TEXT | st.none()
CALLS = st.lists(st.dictionaries(TEXT, TEXT | st.integers() | st.lists(TEXT, max_size=2), max_size=2), max_size=3)
EXTRAS = st.fixed_dictionaries({}, optional={"tools": st.just(TOOLS), "response_format": st.just({"type": "é"})})


def encoder(path):
    """encode_messages of SGLang's or vLLM's module at `path`."""
    folders = [*os.environ.get("DSA_SGLANG_FILES", "").split(os.pathsep), *sys.path]
    file = next((file for folder in folders if (file := Path(folder, path)).is_file()), None)
    if file is None:
        pytest.skip(f"no folder holds {path}")
    return runpy.run_path(str(file))["encode_messages"]


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
            messages.append(says("assistant", draw(TEXT_OR_NOT), reasoning_content=reasoning, tool_calls=calls))
            order = draw(st.permutations(range(len(calls))))
            messages += [says("tool", draw(TEXT), tool_call_id=f"c{i}") for i in order]
    return messages


def compare(name, encode, messages, **options):
    """Encoders take arguments as text, and raise where they cannot go on: V3.2's where a developer's message is
    dropped, for one."""
    try:
        expected = encode(copy.deepcopy(messages))
    except Exception:
        return
    assert FORMATS[name](messages, None, options, add_generation_prompt=True) == expected


@settings(max_examples=300, deadline=None)
@given(messages=conversations(reminders=False), thinking=st.booleans(), drop=st.booleans())
def test_deepseek_v32(messages, thinking, drop):
    encode = encoder("sglang/srt/entrypoints/openai/encoding_dsv32.py")
    theirs = {"thinking_mode": "thinking" if thinking else "chat", "drop_thinking": drop}
    compare("deepseek_v32", partial(encode, **theirs), messages, thinking=thinking, drop_thinking=drop)


@settings(max_examples=300, deadline=None)
@given(
    messages=conversations(reminders=True),
    thinking=st.booleans(),
    drop=st.booleans(),
    efforts=st.sampled_from([("low", "high"), ("high", "max")]),
)
def test_deepseek_v4(messages, thinking, drop, efforts):
    """vLLM's "high" is what the release calls "max", and its "low" what the release calls "high"."""
    encode = encoder("vllm/tokenizers/deepseek_v4_encoding.py")
    for message in messages:
        message["reasoning"] = message.get("reasoning_content")
    theirs = {"thinking_mode": "thinking" if thinking else "chat", "drop_thinking": drop}
    encode = partial(encode, **theirs, reasoning_effort=efforts[0])
    options = {"thinking": thinking, "drop_thinking": drop, "reasoning_effort": efforts[1]}
    compare("deepseek_v4", encode, messages, **options)
