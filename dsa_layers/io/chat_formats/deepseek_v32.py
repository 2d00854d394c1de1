"""DeepSeek-V3.2's chat format, as in its release's encoder: encoding/encoding_dsv32.py."""

from collections.abc import Mapping, Sequence
from typing import Any

from dsa_layers.errors import TokenizerError
from dsa_layers.io.chat_formats.markup import ASSISTANT, BOS, DSML, END_THINK, EOS, THINK, USER, appendix, calls_block
from dsa_layers.io.chat_formats.messages import (
    ChatOptions,
    Message,
    last_user,
    read_messages,
    read_options,
    without_earlier_developers,
)

_ROLES = ("system", "developer", "user", "assistant", "tool")
_CALLS = "function_calls"

# The model was trained with these words.
_TOOLS = f"""\
## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{DSML}function_calls>" block like the following as part of your reply to the \
user:
<{DSML}function_calls>
<{DSML}invoke name="$FUNCTION_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$FUNCTION_NAME2">
...
</{DSML}invoke>
</{DSML}function_calls>
String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:
<{DSML}function_calls>
...
</{DSML}function_calls>
<function_results>
...
</function_results>
{THINK}...thinking about results{END_THINK}
Here are the functions available in JSONSchema format:
<functions>
SCHEMAS
</functions>
"""


def deepseek_v32(messages: Any, tools: Any, options: Mapping[str, Any], *, add_generation_prompt: bool) -> str:
    """The prompt for `messages`. options: thinking or enable_thinking (default: False) and drop_thinking (default:
    True). With thinking, drop_thinking drops developer messages that come before the last message of a user or
    developer. Earlier reasoning is always left out."""
    chosen = read_options(options, thinking=False)
    conversation = read_messages(messages, tools, _ROLES)
    if chosen.thinking and chosen.drop_thinking:
        conversation = without_earlier_developers(conversation)
    text = BOS
    for i in range(len(conversation)):
        said, opening = _message(conversation, i, chosen)
        text += said
        if add_generation_prompt or i + 1 < len(conversation):
            text += opening
    return text


def _message(messages: Sequence[Message], i: int, options: ChatOptions) -> tuple[str, str]:
    """The text of a message, and what opens the assistant's turn after it."""
    message, last = messages[i], last_user(messages)
    thinks = THINK if options.thinking and i >= last else END_THINK
    if message.role == "system":
        return message.content + appendix(message, _TOOLS), ""
    if message.role == "developer":
        text = f"{appendix(message, _TOOLS)}\n\n# The user's message is: {message.content}"
        return USER + text, ASSISTANT + thinks
    if message.role == "user":
        return USER + message.content, ASSISTANT + thinks
    if message.role == "tool":
        number, calls = _result_of(messages, i)
        begin = "\n\n<function_results>" if number == 1 else ""
        text = f"{begin}\n<result>{message.content}</result>"
        return (f"{text}\n</function_results>", f"\n\n{thinks}") if number == calls else (text, "")
    reasons = options.thinking and i > last
    return (message.reasoning + END_THINK if reasons else "") + message.content + calls_block(_CALLS, message) + EOS, ""


def _result_of(messages: Sequence[Message], i: int) -> tuple[int, int]:
    """(the number of this result among those after an assistant's message, from 1 on; that message's calls)."""
    before = next((j for j in range(i, -1, -1) if messages[j].role != "tool"), i)
    calls = len(messages[before].tool_calls)
    if not 0 < i - before <= calls:
        raise TokenizerError(
            f"{messages[i].place}: a tool's result must follow the assistant's message that calls it; result "
            f"{i - before} of {calls} calls"
        )
    return i - before, calls
