"""Special tokens of DeepSeek's chat formats, and tools and their calls in DeepSeek's markup language (DSML)."""

import json
from collections.abc import Mapping
from typing import Any

from dsa_layers.io.chat_formats.messages import Message

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
LATEST_REMINDER = "<｜latest_reminder｜>"
THINK, END_THINK = "<think>", "</think>"
DSML = "｜DSML｜"

# Tokens that every format needs. A tokenizer without them is not made for conversations.
NEEDED = (USER, ASSISTANT, BOS, EOS)


def appendix(message: Message, tools_text: str) -> str:
    """What follows the text of a system or developer message: its tools and the format of the reply.

    tools_text  explains the tools to the model; SCHEMAS in it stands for their schemas, one per line
    """
    text = ""
    if message.tools:
        schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in message.tools)
        text += "\n\n" + tools_text.replace("SCHEMAS", schemas)
    if message.response_format:
        schema = json.dumps(message.response_format, ensure_ascii=False)
        text += "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n" + schema
    return text


def calls_block(name: str, message: Message) -> str:
    """The block <name> of a message's tool calls; "" for a message without calls."""
    if not message.tool_calls:
        return ""
    blocks = []
    for call in message.tool_calls:
        parameters = []
        for parameter, value in _arguments(call["function"]["arguments"]).items():
            is_text = isinstance(value, str)
            text = value if is_text else json.dumps(value, ensure_ascii=False)
            string = str(is_text).lower()
            parameters.append(f'<{DSML}parameter name="{parameter}" string="{string}">{text}</{DSML}parameter>')
        opening = f'<{DSML}invoke name="{call["function"]["name"]}">'
        blocks.append("\n".join([opening, "\n".join(parameters), f"</{DSML}invoke>"]))
    calls = "\n".join(blocks)
    return f"\n\n<{DSML}{name}>\n{calls}\n</{DSML}{name}>"


def _arguments(given: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """A call's arguments. They are given as a mapping, or as the JSON text of one. Any other text, which a model can
    write, becomes the value of a parameter "arguments"."""
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, Mapping) else {"arguments": given}
