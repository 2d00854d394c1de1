"""A conversation's messages, in the form of OpenAI's chat API, and the options of a chat format, checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsa_layers.arguments import shown, shown_json
from dsa_layers.errors import TokenizerError


@dataclass(frozen=True)
class Message:
    """One checked message. place: its name in errors, such as messages[0]. tools: the schemas of functions."""

    place: str
    role: str
    content: str = ""
    reasoning: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    response_format: Any = None
    tool_calls: Sequence[Mapping[str, Any]] = ()
    tool_call_id: Any = None


@dataclass(frozen=True)
class ChatOptions:
    """thinking: the reply begins with reasoning. drop_thinking: leave out earlier reasoning and earlier messages of
    developers. max_effort: tell the model to reason as much as it can."""

    thinking: bool
    drop_thinking: bool
    max_effort: bool


def read_messages(messages: Any, tools: Any, roles: Sequence[str]) -> list[Message]:
    """Check `messages`. Attach `tools` to the first system message; without one, insert an empty one at the beginning.
    Raises TokenizerError that names the message and the field."""
    read = [_message(f"messages[{i}]", message, roles) for i, message in enumerate(_list("messages", messages))]
    if not read:
        raise TokenizerError("messages: must hold a message, got none")
    if tools:
        if not any(message.role == "system" for message in read):
            read.insert(0, Message("tools", "system"))
        first = next(i for i, message in enumerate(read) if message.role == "system")
        read[first] = replace(read[first], tools=_functions("tools", tools))
    return read


def last_user(messages: Sequence[Message]) -> int:
    """The index of the last message of a user or developer, -1 without one."""
    return max((i for i, message in enumerate(messages) if message.role in ("user", "developer")), default=-1)


def without_earlier_developers(messages: Sequence[Message]) -> list[Message]:
    """Drop developer messages that come before the last message of a user or developer."""
    last = last_user(messages)
    return [message for i, message in enumerate(messages) if message.role != "developer" or i >= last]


def read_options(given: Mapping[str, Any], *, thinking: bool, efforts: Sequence[str] = ()) -> ChatOptions:
    """Read options by the names that engines use: thinking or enable_thinking (either turns it on), drop_thinking and,
    for a format with efforts, reasoning_effort. A value of None counts as not given.

    thinking  default of the option thinking
    efforts   accepted values of reasoning_effort; "none" turns thinking off, "max" sets max_effort
    Raises TokenizerError for another option or value.
    """
    names = ("thinking", "enable_thinking", "drop_thinking", *(("reasoning_effort",) if efforts else ()))
    for name, value in given.items():
        if name not in names:
            raise TokenizerError(f"{name}: is no option of this chat format; accepted: {', '.join(names)}")
        if name == "reasoning_effort":
            if value not in (None, *efforts):
                raise TokenizerError(f"{name}: must be one of {', '.join(efforts)}, got {shown_json(value)}")
        elif not isinstance(value, bool | None):
            raise TokenizerError(f"{name}: must be true or false, got {shown_json(value)}")
    given = {name: value for name, value in given.items() if value is not None}
    asked = [given[name] for name in ("thinking", "enable_thinking") if name in given]
    effort = given.get("reasoning_effort")
    thinking = effort != "none" and (any(asked) if asked else thinking)
    return ChatOptions(thinking, given.get("drop_thinking", True), effort == "max")


def _message(place: str, message: Any, roles: Sequence[str]) -> Message:
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in roles:
        raise TokenizerError(f"{place}: must be a mapping with a role of {', '.join(roles)}, got {shown(message)}")
    return Message(
        place,
        role,
        _text(f"{place}.content", message.get("content"), may_lack=role in ("system", "assistant")),
        reasoning=_text(f"{place}.reasoning_content", message.get("reasoning_content"), may_lack=True),
        tools=_functions(f"{place}.tools", message.get("tools")),
        response_format=message.get("response_format"),
        tool_calls=_calls(f"{place}.tool_calls", message.get("tool_calls")),
        tool_call_id=message.get("tool_call_id"),
    )


def _text(place: str, content: Any, *, may_lack: bool) -> str:
    """A string, or a list of {"type": "text", "text": ...}, which blank lines join."""
    if content is None and may_lack:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple) and all(isinstance(part, Mapping) and "text" in part for part in content):
        return "\n\n".join(str(part["text"]) for part in content)
    raise TokenizerError(
        f'{place}: must be a string or a list of {{"type": "text", "text": ...}}, got {shown(content)}'
    )


def _calls(place: str, calls: Any) -> Sequence[Mapping[str, Any]]:
    for function in _functions(place, calls):
        if not isinstance(function.get("name"), str) or not isinstance(function.get("arguments"), str | Mapping):
            raise TokenizerError(f"{place}: a function must have a name and arguments, got {shown(function)}")
    return calls or ()


def _functions(place: str, holders: Any) -> list[Mapping[str, Any]]:
    """The functions of tools, or of calls of tools."""
    functions = []
    for i, holder in enumerate(_list(place, holders or ())):
        function = holder.get("function") if isinstance(holder, Mapping) else None
        if not isinstance(function, Mapping):
            raise TokenizerError(f'{place}[{i}]: must be {{"type": "function", "function": ...}}, got {shown(holder)}')
        functions.append(function)
    return functions


def _list(place: str, value: Any) -> Sequence[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TokenizerError(f"{place}: must be a list, got {shown(value)}")
    return value
