"""Tools and calls of tools in DeepSeek's markup language (DSML)."""

import json
from collections.abc import Mapping
from typing import Any

from dsa_layers.arguments import shown_json
from dsa_layers.errors import TokenizerError
from dsa_layers.io.chat_formats.conversation import Message, ToolCall, to_json
from dsa_layers.io.chat_formats.tokens import DSML


def appendix(message: Message, tools_text: str) -> str:
    """What follows the text of a system or developer message: its tools and the format of the reply. tools_text: says
    what tools are, with SCHEMAS in the place of their schemas, one a line."""
    text = ""
    if message.tools:
        text += "\n\n" + tools_text.replace("SCHEMAS", "\n".join(message.tools))
    if message.response_format:
        schema = to_json(f"{message.place}.response_format", message.response_format)
        text += "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n" + schema
    return text


def calls_block(name: str, message: Message, *, keep_invalid: bool) -> str:
    """The block <name> of a message's tool calls, "" without one. keep_invalid: arguments that are no JSON become a
    parameter "arguments"; else they are an error."""
    if not message.tool_calls:
        return ""
    place = f"{message.place}.tool_calls"
    calls = "\n".join(_call(f"{place}[{i}]", call, keep_invalid) for i, call in enumerate(message.tool_calls))
    return f"\n\n<{DSML}{name}>\n{calls}\n</{DSML}{name}>"


def _call(place: str, call: ToolCall, keep_invalid: bool) -> str:
    arguments = _arguments(f"{place}.function.arguments", call.arguments, keep_invalid)
    parameters = "\n".join(_parameter(place, name, value) for name, value in arguments.items())
    return f'<{DSML}invoke name="{call.name}">\n{parameters}\n</{DSML}invoke>'


def _arguments(place: str, arguments: str | Mapping[str, Any], keep_invalid: bool) -> Mapping[str, Any]:
    if isinstance(arguments, Mapping):
        return arguments
    try:
        read = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        if keep_invalid:
            return {"arguments": arguments}
        raise TokenizerError(f"{place}: must be a JSON object, got text that is no JSON: {error}") from None
    if not isinstance(read, dict):
        raise TokenizerError(f"{place}: must be a JSON object, got {shown_json(read)}")
    return read


def _parameter(place: str, name: str, value: Any) -> str:
    is_text = isinstance(value, str)
    text = value if is_text else to_json(place, value)
    return f'<{DSML}parameter name="{name}" string="{str(is_text).lower()}">{text}</{DSML}parameter>'
