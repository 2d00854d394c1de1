"""Our chat formats beside the encoders that engines took over from DeepSeek's releases.

Skipped unless DSA_SGLANG_FILES names folders with SGLang's .py files (docs/engines.md), and vLLM's are on the path.
"""

import copy
import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_layers.generation.chat_formats import FORMATS
from tests.layers.generation.chat_examples import TOOLS, call, says

TEXT = st.text("ab é\n<", max_size=3)
TEXT_OR_NOT = TEXT | st.none()
CALLS = st.lists(st.dictionaries(TEXT, TEXT | st.integers() | st.lists(TEXT, max_size=2), max_size=2), max_size=3)
EXTRAS = st.fixed_dictionaries({}, optional={"tools": st.just(TOOLS), "response_format": st.just({"type": "é"})})


def encoder(*, of: str, path: str):
    """The module at `path` in SGLang's or vLLM's files; None where they are not there."""
    if of == "vllm":
        spec = importlib.util.find_spec("vllm")
        folders = [Path(spec.origin).parents[1]] if spec is not None and spec.origin else []
    else:
        folders = [Path(folder) for folder in os.environ.get("DSA_SGLANG_FILES", "").split(os.pathsep) if folder]
    for file in [folder / path for folder in folders if (folder / path).is_file()]:
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    pytest.skip(f"no file {path} of {of}")


@st.composite
def conversations(draw, *, reminders: bool):
    messages = [says("system", draw(TEXT_OR_NOT), **draw(EXTRAS))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        if reminders and draw(st.booleans()):
            messages.append(says("latest_reminder", draw(TEXT)))
        if draw(st.integers(0, 3)):
            messages.append(says("user", draw(TEXT)))
        else:
            messages.append(says("developer", draw(TEXT) + "D", **draw(EXTRAS)))
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
    module = encoder(of="sglang", path="sglang/srt/entrypoints/openai/encoding_dsv32.py")
    mode = "thinking" if thinking else "chat"
    options = {"thinking": thinking, "drop_thinking": drop}
    compare("deepseek_v32", lambda m: module.encode_messages(m, mode, drop_thinking=drop), messages, **options)


@settings(max_examples=300, deadline=None)
@given(
    messages=conversations(reminders=True), thinking=st.booleans(), drop=st.booleans(), effort=st.sampled_from([0, 1])
)
def test_deepseek_v4(messages, thinking, drop, effort):
    """vLLM's "high" is what the release calls "max", and its "low" what the release calls "high"."""
    module = encoder(of="vllm", path="vllm/tokenizers/deepseek_v4_encoding.py")
    mode, theirs, ours = "thinking" if thinking else "chat", ("low", "high")[effort], ("high", "max")[effort]

    def encode(messages):
        for message in messages:
            message["reasoning"] = message.pop("reasoning_content", None)
        return module.encode_messages(messages, mode, drop_thinking=drop, reasoning_effort=theirs)

    options = {"thinking": thinking, "drop_thinking": drop, "reasoning_effort": ours}
    compare("deepseek_v4", encode, messages, **options)
