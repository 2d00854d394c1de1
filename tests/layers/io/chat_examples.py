"""Conversations and the prompts that DeepSeek's formats make of them, written by hand."""

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

V32_TOOLS = f"""\
## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the \
user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>
String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:
<｜DSML｜function_calls>
...
</｜DSML｜function_calls>
<function_results>
...
</function_results>
<think>...thinking about results</think>
Here are the functions available in JSONSchema format:
<functions>
{SCHEMA}
</functions>
"""
V4_TOOLS = f"""\
## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> \
BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{SCHEMA}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
MAX_EFFORT = """\
Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, \
rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, \
and rejected hypothesis to ensure absolutely no assumption is left unchecked.

"""

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
    ("thinking, named otherwise", QUESTION, {"enable_thinking": True}, f"{USER}Q{ASSISTANT}<think>"),
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
    (
        "results of tools, no reply begun",
        CALLED,
        {"add_generation_prompt": False},
        f"S{USER}Q{ASSISTANT}</think>{V32_CALLS}{EOS}\n\n<function_results>\n<result>2</result>\n"
        "<result>1</result>\n</function_results>",
    ),
]
V4 = [
    ("a question", QUESTION, {}, f"{USER}Q{ASSISTANT}<think>"),
    ("parts", PARTS, {}, f"{USER}a\n\nb{ASSISTANT}<think>"),
    ("no thinking", QUESTION, {"enable_thinking": False}, f"{USER}Q{ASSISTANT}</think>"),
    ("no effort", QUESTION, {"reasoning_effort": "none"}, f"{USER}Q{ASSISTANT}</think>"),
    ("high effort", QUESTION, {"reasoning_effort": "high"}, f"{USER}Q{ASSISTANT}<think>"),
    ("greatest effort", QUESTION, {"reasoning_effort": "max"}, f"{MAX_EFFORT}{USER}Q{ASSISTANT}<think>"),
    (
        "effort without thinking",
        QUESTION,
        {"reasoning_effort": "max", "thinking": False},
        f"{USER}Q{ASSISTANT}</think>",
    ),
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
