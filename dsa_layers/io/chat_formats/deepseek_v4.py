"""DeepSeek-V4's chat format, as in its release's encoder: encoding/encoding_dsv4.py."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from dsa_layers.io.chat_formats.markup import (
    ASSISTANT,
    BOS,
    DSML,
    END_THINK,
    EOS,
    LATEST_REMINDER,
    THINK,
    USER,
    appendix,
    calls_block,
)
from dsa_layers.io.chat_formats.messages import (
    Message,
    last_user,
    read_messages,
    read_options,
    without_earlier_developers,
)

_ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
_EFFORTS = ("none", "high", "max")
_CALLS = "tool_calls"

# The model was trained with these words.
_MAX_EFFORT = """\
Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, \
rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, \
and rejected hypothesis to ensure absolutely no assumption is left unchecked.

"""
_TOOLS = f"""\
## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<{DSML}tool_calls>" block like the following:

<{DSML}tool_calls>
<{DSML}invoke name="$TOOL_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$TOOL_NAME2">
...
</{DSML}invoke>
</{DSML}tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside \
{THINK}...{END_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

SCHEMAS

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""


def deepseek_v4(messages: Any, tools: Any, options: Mapping[str, Any], *, add_generation_prompt: bool) -> str:
    """The prompt for `messages`. options: thinking or enable_thinking (default: True); reasoning_effort: "none" turns
    thinking off, "high" (default) or "max"; drop_thinking (default: True).

    With thinking, drop_thinking drops reasoning and developer messages that come before the last message of a user,
    tool or developer. It has no effect if a message has tools.
    """
    chosen = read_options(options, thinking=True, efforts=_EFFORTS)
    conversation = _users_turns(read_messages(messages, tools, _ROLES))
    drop = chosen.drop_thinking and not any(message.tools for message in conversation)
    if chosen.thinking and drop:
        conversation = without_earlier_developers(conversation)
    last = last_user(conversation)
    text = BOS + (_MAX_EFFORT if chosen.thinking and chosen.max_effort else "")
    for i, message in enumerate(conversation):
        if message.role == "assistant":
            reasons = chosen.thinking and (not drop or i > last)
            text += (message.reasoning + END_THINK if reasons else "") + message.content
            text += calls_block(_CALLS, message) + EOS
        else:
            text += _of_others(message)
        following = conversation[i + 1].role if i + 1 < len(conversation) else None
        replies = following in ("assistant", "latest_reminder") or (following is None and add_generation_prompt)
        if message.role in ("user", "developer") and replies:
            reasons = chosen.thinking and (not drop or i >= last)
            text += ASSISTANT + (THINK if reasons else END_THINK)
    return text


def _of_others(message: Message) -> str:
    """The text of a message that is not the assistant's."""
    if message.role == "user":
        return USER + message.content
    if message.role == "latest_reminder":
        return LATEST_REMINDER + message.content
    begin = USER if message.role == "developer" else ""
    return begin + message.content + appendix(message, _TOOLS)


def _users_turns(messages: Sequence[Message]) -> list[Message]:
    """Join consecutive messages of the user and of tools into one message of the user."""
    turns: list[Message] = []
    calls: dict[str, int] = {}  # id -> position among the last message's calls
    for of_user, group in groupby(messages, lambda message: message.role in ("user", "tool")):
        parts = list(group)
        if of_user:
            turns.append(replace(parts[0], role="user", content=_joined(parts, calls)))
            continue
        turns += parts
        for message in parts:
            if message.tool_calls:
                calls = {call["id"]: i for i, call in enumerate(message.tool_calls) if call.get("id")}
    return turns


def _joined(parts: Sequence[Message], calls: Mapping[str, int]) -> str:
    """Join the texts. Results of tools are sorted by the order of their calls; the user's texts keep their places."""
    results = iter(sorted((one for one in parts if one.role == "tool"), key=lambda one: calls.get(one.tool_call_id, 0)))
    texts = [
        part.content if part.role == "user" else f"<tool_result>{next(results).content}</tool_result>" for part in parts
    ]
    return "\n\n".join(texts)
