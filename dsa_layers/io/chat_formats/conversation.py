"""The messages of a conversation, checked."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsa_layers.arguments import shown
from dsa_layers.errors import TokenizerError

_FIELDS = {
    "tools": ("system", "developer"),
    "response_format": ("system", "developer"),
    "tool_calls": ("assistant",),
}


@dataclass(frozen=True)
class ToolCall:
    """arguments: a JSON object as text, or already read."""

    name: str
    arguments: str | Mapping[str, Any]
    call_id: str | None


@dataclass(frozen=True)
class Message:
    """One checked message. place: its name in errors, such as messages[0]. tools: schemas of functions, in JSON."""

    place: str
    role: str
    content: str = ""
    reasoning: str = ""
    tools: Sequence[str] = ()
    response_format: Any = None
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None


def read_conversation(messages: Any, tools: Any, roles: Sequence[str]) -> list[Message]:
    """Check `messages`, which have the form of OpenAI's chat API. Attach `tools` to the first system message; without
    one, insert an empty one at the beginning. Raises TokenizerError that names the message and the field."""
    read = [_message(f"messages[{i}]", message, roles) for i, message in enumerate(_list("messages", messages))]
    if not read:
        raise TokenizerError("messages: must hold a message, got none")
    if tools:
        if not any(message.role == "system" for message in read):
            read.insert(0, Message("tools", "system"))
        first = next(i for i, message in enumerate(read) if message.role == "system")
        read[first] = replace(read[first], tools=_schemas("tools", tools))
    return read


def last_user(messages: Sequence[Message]) -> int:
    """The index of the last message of a user or developer, -1 without one."""
    return max((i for i, message in enumerate(messages) if message.role in ("user", "developer")), default=-1)


def without_earlier_developers(messages: Sequence[Message]) -> list[Message]:
    """Drop developer messages that come before the last message of a user or developer."""
    last = last_user(messages)
    return [message for i, message in enumerate(messages) if message.role != "developer" or i >= last]


def to_json(place: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{place}: must be JSON, got {shown(value)}: {error}") from None


def _message(place: str, message: Any, roles: Sequence[str]) -> Message:
    _mapping(place, message)
    role = message.get("role")
    if role not in roles:
        raise TokenizerError(f"{place}: role must be one of {', '.join(roles)}, got {shown(role)}")
    content = _text(f"{place}.content", message.get("content"), may_lack=role in ("system", "assistant"))
    if role == "developer" and not content:
        raise TokenizerError(f"{place}.content: must not be empty for a developer, got ''")
    for name, of_roles in _FIELDS.items():
        if message.get(name) and role not in of_roles:
            raise TokenizerError(f"{place}.{name}: must come with role {' or '.join(of_roles)}, got {role}")
    return Message(
        place,
        role,
        content,
        reasoning=_text(f"{place}.reasoning_content", message.get("reasoning_content"), may_lack=True),
        tools=_schemas(f"{place}.tools", message.get("tools")),
        response_format=message.get("response_format"),
        tool_calls=_calls(f"{place}.tool_calls", message.get("tool_calls")),
        tool_call_id=_id(message.get("tool_call_id")),
    )


def _text(place: str, content: Any, *, may_lack: bool) -> str:
    """A string, or a list of {"type": "text", "text": ...}, which blank lines join."""
    if content is None and may_lack:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        return "\n\n".join(_part(f"{place}[{i}]", part) for i, part in enumerate(content))
    raise TokenizerError(f"{place}: must be a string or a list of text parts, got {shown(content)}")


def _part(place: str, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise TokenizerError(f'{place}: must be {{"type": "text", "text": ...}}, got {shown(part)}')


def _schemas(place: str, tools: Any) -> list[str]:
    places = {f"{place}[{i}]": tool for i, tool in enumerate(_list(place, tools or ()))}
    return [to_json(f"{one}.function", _function(one, tool)) for one, tool in places.items()]


def _calls(place: str, calls: Any) -> list[ToolCall]:
    read = []
    for i, call in enumerate(_list(place, calls or ())):
        function = _function(f"{place}[{i}]", call)
        if not isinstance(function.get("name"), str) or not isinstance(function.get("arguments"), str | Mapping):
            raise TokenizerError(f"{place}[{i}].function: must have a name and arguments, got {shown(function)}")
        read.append(ToolCall(function["name"], function["arguments"], _id(call.get("id") or function.get("id"))))
    return read


def _id(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _function(place: str, holder: Any) -> Mapping[str, Any]:
    _mapping(place, holder)
    function = holder.get("function")
    _mapping(f"{place}.function", function)
    return function


def _mapping(place: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TokenizerError(f"{place}: must be a mapping, got {shown(value)}")


def _list(place: str, value: Any) -> Sequence[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TokenizerError(f"{place}: must be a list, got {shown(value)}")
    return value
