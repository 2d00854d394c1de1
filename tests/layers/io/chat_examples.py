"""Conversations and the prompts that DeepSeek's formats make of them, written by hand."""

import re

from dsa_layers.io.chat_template import FORMATS


def macro(model_type, name):
    """The text of a format's macro."""
    source = FORMATS[model_type].read_text(encoding="utf-8")
    return re.search(rf"macro {name}\(\w*\) -%}}\n(.*?){{% endmacro", source, re.DOTALL)[1]


V32_TEXT, V4_TEXT = (macro(model_type, "explained") for model_type in FORMATS)
MAX_EFFORT = macro("deepseek_v4", "maximum_effort")
BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
FUNCTION = {"name": "add", "description": "à + b"}
TOOLS = [{"type": "function", "function": FUNCTION}]
SCHEMA = '{"name": "add", "description": "à + b"}'


def says(role, content, **fields):
    return {"role": role, "content": content, **fields}


def call(name, arguments, call_id=None):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


TWO_CALLS = says(
    "assistant",
    None,
    reasoning_content="R",
    tool_calls=[call("add", '{"a": 1, "b": "x <y>"}', "c1"), call("now", {"in": {"é": [None]}}, "c2")],
)
WRITTEN_CALLS = """\


<｜DSML｜BLOCK>
<｜DSML｜invoke name="add">
<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>
<｜DSML｜parameter name="b" string="true">x <y></｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="now">
<｜DSML｜parameter name="in" string="false">{"é": [null]}</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜BLOCK>"""
V32_CALLS = WRITTEN_CALLS.replace("BLOCK", "function_calls")
V4_CALLS = WRITTEN_CALLS.replace("BLOCK", "tool_calls")
FORMAT = '\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{"type": "object"}'

V32_TOOLS, V4_TOOLS = (text.replace("{{ schemas(tools) }}", SCHEMA) for text in (V32_TEXT, V4_TEXT))

QUESTION = [says("user", "Q")]
EARLIER = [says("system", "S"), says("user", "Q1"), says("assistant", "A1", reasoning_content="R1"), says("user", "Q2")]
DEVELOPERS = [says("developer", "D1"), says("assistant", "A1"), says("developer", "D2", tools=TOOLS)]
RESULTS = [says("tool", "2", tool_call_id="c2"), says("tool", "1", tool_call_id="c1")]
CALLED = [says("system", "S"), says("user", "Q"), TWO_CALLS, *RESULTS]
PARTS = [says("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]

# (name, messages, arguments of apply_chat_template, the prompt after BOS)
V32 = [
    ("a question", QUESTION, {}, f"{USER}Q{ASSISTANT}</think>"),
    ("parts", PARTS, {}, f"{USER}a\n\nb{ASSISTANT}</think>"),
    ("thinking", QUESTION, {"thinking": True}, f"{USER}Q{ASSISTANT}<think>"),
    ("no reply begun", QUESTION, {"add_generation_prompt": False}, f"{USER}Q"),
    (
        "earlier reasoning is dropped",
        EARLIER,
        {"thinking": True},
        f"S{USER}Q1{ASSISTANT}</think>A1{EOS}{USER}Q2{ASSISTANT}<think>",
    ),
    (
        "the last reply keeps it",
        [*QUESTION, says("assistant", "A1", reasoning_content="R")],
        {"thinking": True},
        f"{USER}Q{ASSISTANT}<think>R</think>A1{EOS}",
    ),
    ("tools", QUESTION, {"tools": TOOLS}, f"\n\n{V32_TOOLS}{USER}Q{ASSISTANT}</think>"),
    (
        "tools and a format of replies",
        [says("system", "S", response_format={"type": "object"}), *QUESTION],
        {"tools": TOOLS},
        f"S\n\n{V32_TOOLS}{FORMAT}{USER}Q{ASSISTANT}</think>",
    ),
    (
        "developers",
        DEVELOPERS,
        {"thinking": True, "drop_thinking": False},
        f"{USER}\n\n# The user's message is: D1{ASSISTANT}</think>A1{EOS}"
        f"{USER}\n\n{V32_TOOLS}\n\n# The user's message is: D2{ASSISTANT}<think>",
    ),
    (
        "earlier developers are dropped",
        DEVELOPERS,
        {"thinking": True},
        f"A1{EOS}{USER}\n\n{V32_TOOLS}\n\n# The user's message is: D2{ASSISTANT}<think>",
    ),
    (
        "results of tools",
        CALLED,
        {"thinking": True},
        f"S{USER}Q{ASSISTANT}<think>R</think>{V32_CALLS}{EOS}\n\n<function_results>\n<result>2</result>\n"
        "<result>1</result>\n</function_results>\n\n<think>",
    ),
]
V4 = [
    ("a question", QUESTION, {}, f"{USER}Q{ASSISTANT}<think>"),
    ("no thinking", QUESTION, {"enable_thinking": False}, f"{USER}Q{ASSISTANT}</think>"),
    ("greatest effort", QUESTION, {"reasoning_effort": "max"}, f"{MAX_EFFORT}{USER}Q{ASSISTANT}<think>"),
    ("no reply begun", QUESTION, {"add_generation_prompt": False}, f"{USER}Q"),
    (
        "earlier reasoning is dropped",
        EARLIER,
        {},
        f"S{USER}Q1{ASSISTANT}</think>A1{EOS}{USER}Q2{ASSISTANT}<think>",
    ),
    (
        "earlier reasoning is kept",
        EARLIER,
        {"drop_thinking": False},
        f"S{USER}Q1{ASSISTANT}<think>R1</think>A1{EOS}{USER}Q2{ASSISTANT}<think>",
    ),
    (
        "earlier reasoning is kept with tools",
        EARLIER,
        {"tools": TOOLS},
        f"S\n\n{V4_TOOLS}{USER}Q1{ASSISTANT}<think>R1</think>A1{EOS}{USER}Q2{ASSISTANT}<think>",
    ),
    (
        "earlier developers are dropped",
        [says("developer", "D1"), says("assistant", "A1"), says("developer", "D2", response_format={"type": "object"})],
        {},
        f"A1{EOS}{USER}D2{FORMAT}{ASSISTANT}<think>",
    ),
    (
        "developers with tools",
        DEVELOPERS,
        {},
        f"{USER}D1{ASSISTANT}<think></think>A1{EOS}{USER}D2\n\n{V4_TOOLS}{ASSISTANT}<think>",
    ),
    (
        "a reminder",
        [says("system", "S"), says("latest_reminder", "today"), *QUESTION],
        {},
        f"S<｜latest_reminder｜>today{USER}Q{ASSISTANT}<think>",
    ),
    (
        "results of tools are the user's, in the order of calls",
        [*CALLED, says("user", "next")],
        {},
        f"S{USER}Q{ASSISTANT}</think>{V4_CALLS}{EOS}{USER}<tool_result>1</tool_result>\n\n"
        f"<tool_result>2</tool_result>\n\nnext{ASSISTANT}<think>",
    ),
    (
        "arguments that are no JSON",
        [*QUESTION, says("assistant", "A", tool_calls=[call("f", "{a")])],
        {"thinking": False},
        f"{USER}Q{ASSISTANT}</think>A\n\n<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="arguments" string="true">{a</｜DSML｜parameter>\n'
        f"</｜DSML｜invoke>\n</｜DSML｜tool_calls>{EOS}",
    ),
]
