"""Conversations and their prompts in DeepSeek's formats, written by hand except for the texts that `macro` reads."""

import re

from dsa_layers.io.chat_template import FORMATS


def macro(model_type, name):
    source = FORMATS[model_type].read_text(encoding="utf-8")
    return re.search(rf"macro {name}\(\w*\) -%}}\n(.*?){{% endmacro", source, re.DOTALL)[1]


V32_TEXT, V4_TEXT = (macro(model_type, "explained") for model_type in FORMATS)
MAX_EFFORT = macro("deepseek_v4", "maximum_effort")
BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
TOOLS = [{"type": "function", "function": {"name": "add", "description": "à + b"}}]
SCHEMA = '{"name": "add", "description": "à + b"}'
V32_TOOLS, V4_TOOLS = (text.replace("{{ schemas(tools) }}", SCHEMA) for text in (V32_TEXT, V4_TEXT))


def says(role, content, **fields):
    return {"role": role, "content": content, **fields}


def call(name, arguments, call_id=None):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


CALLS = [call("add", '{"a": 1, "b": "x <y>"}', "c1"), call("now", {"in": {"é": [None]}}, "c2")]
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
NO_JSON = """\


<｜DSML｜tool_calls>
<｜DSML｜invoke name="f">
<｜DSML｜parameter name="arguments" string="true">{a</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls>"""
FORMAT = '\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{"type": "object"}'
V32_DEVELOPER = f"{USER}\n\n{V32_TOOLS}\n\n# The user's message is: D2{ASSISTANT}<think>"
V32_RESULTS = "\n\n<function_results>\n<result>2</result>\n<result>1</result>\n</function_results>\n\n<think>"
# Results follow the order of the calls.
V4_RESULTS = f"{USER}<tool_result>1</tool_result>\n\n<tool_result>2</tool_result>\n\nN{ASSISTANT}<think>"
WITH_REASONING = f"{USER}Q1{ASSISTANT}<think>R1</think>A1{EOS}{USER}Q2{ASSISTANT}<think>"

QUESTION = [says("user", "Q")]
ANSWERED = [*QUESTION, says("assistant", "A1", reasoning_content="R")]
EARLIER = [says("system", "S"), says("user", "Q1"), says("assistant", "A1", reasoning_content="R1"), says("user", "Q2")]
FORMATTED = [says("system", "S", response_format={"type": "object"}), *QUESTION]
DEVELOPERS = [says("developer", "D1"), says("assistant", "A1"), says("developer", "D2", tools=TOOLS)]
FORMATTED_DEVELOPERS = [*DEVELOPERS[:2], says("developer", "D2", response_format={"type": "object"})]
RESULTS = [says("tool", "2", tool_call_id="c2"), says("tool", "1", tool_call_id="c1")]
CALLED = [*EARLIER[:1], *QUESTION, says("assistant", None, reasoning_content="R", tool_calls=CALLS), *RESULTS]
PARTS = [says("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]
REMINDED = [says("system", "S"), says("latest_reminder", "today"), *QUESTION]
BROKEN_CALL = [*QUESTION, says("assistant", "A", tool_calls=[call("f", "{a")])]
THINK, KEEP = {"thinking": True}, {"drop_thinking": False}

# (messages, arguments of apply_chat_template, the prompt after BOS)
V32 = [
    (QUESTION, {}, f"{USER}Q{ASSISTANT}</think>"),
    (PARTS, {}, f"{USER}a\n\nb{ASSISTANT}</think>"),
    (QUESTION, THINK, f"{USER}Q{ASSISTANT}<think>"),
    (QUESTION, {"add_generation_prompt": False}, f"{USER}Q"),
    (EARLIER, THINK, f"S{USER}Q1{ASSISTANT}</think>A1{EOS}{USER}Q2{ASSISTANT}<think>"),
    (ANSWERED, THINK, f"{USER}Q{ASSISTANT}<think>R</think>A1{EOS}"),
    (QUESTION, {"tools": TOOLS}, f"\n\n{V32_TOOLS}{USER}Q{ASSISTANT}</think>"),
    (FORMATTED, {"tools": TOOLS}, f"S\n\n{V32_TOOLS}{FORMAT}{USER}Q{ASSISTANT}</think>"),
    (DEVELOPERS, THINK | KEEP, f"{USER}\n\n# The user's message is: D1{ASSISTANT}</think>A1{EOS}{V32_DEVELOPER}"),
    (DEVELOPERS, THINK, f"A1{EOS}{V32_DEVELOPER}"),
    (CALLED, THINK, f"S{USER}Q{ASSISTANT}<think>R</think>{V32_CALLS}{EOS}{V32_RESULTS}"),
]
V4 = [
    (QUESTION, {}, f"{USER}Q{ASSISTANT}<think>"),
    (QUESTION, {"enable_thinking": False}, f"{USER}Q{ASSISTANT}</think>"),
    (QUESTION, {"reasoning_effort": "max"}, f"{MAX_EFFORT}{USER}Q{ASSISTANT}<think>"),
    (QUESTION, {"add_generation_prompt": False}, f"{USER}Q"),
    (EARLIER, {}, f"S{USER}Q1{ASSISTANT}</think>A1{EOS}{USER}Q2{ASSISTANT}<think>"),
    (EARLIER, KEEP, f"S{WITH_REASONING}"),
    (EARLIER, {"tools": TOOLS}, f"S\n\n{V4_TOOLS}{WITH_REASONING}"),  # tools keep the reasoning of earlier answers
    (FORMATTED_DEVELOPERS, {}, f"A1{EOS}{USER}D2{FORMAT}{ASSISTANT}<think>"),
    (DEVELOPERS, {}, f"{USER}D1{ASSISTANT}<think></think>A1{EOS}{USER}D2\n\n{V4_TOOLS}{ASSISTANT}<think>"),
    (REMINDED, {}, f"S<｜latest_reminder｜>today{USER}Q{ASSISTANT}<think>"),
    ([*CALLED, says("user", "N")], {}, f"S{USER}Q{ASSISTANT}</think>{V4_CALLS}{EOS}{V4_RESULTS}"),
    (BROKEN_CALL, {"thinking": False}, f"{USER}Q{ASSISTANT}</think>A{NO_JSON}{EOS}"),
]
EXAMPLES = [*(("deepseek_v32", *one) for one in V32), *(("deepseek_v4", *one) for one in V4)]
