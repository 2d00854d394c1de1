"""What a caller asks of a format besides the messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsa_layers.arguments import shown
from dsa_layers.errors import TokenizerError


@dataclass(frozen=True)
class ChatOptions:
    """thinking: the reply begins with reasoning. drop_thinking: what only earlier turns needed is left out.
    max_effort: the model is told to reason as much as it can."""

    thinking: bool
    drop_thinking: bool = True
    max_effort: bool = False


def read_options(given: Mapping[str, Any], *, thinking: bool, efforts: Sequence[str] = ()) -> ChatOptions:
    """Options by the names that engines give them: thinking and enable_thinking, of which one that is true is enough,
    drop_thinking, and where there are efforts reasoning_effort. None is an option that is not given.

    thinking  without these options
    efforts   that reasoning_effort may have; "none" turns thinking off, "max" is max_effort
    Raises TokenizerError for another option or value.
    """
    names = ("thinking", "enable_thinking", "drop_thinking", *(("reasoning_effort",) if efforts else ()))
    for name in given:
        if name not in names:
            raise TokenizerError(f"{name}: is no option of this chat format; accepted: {', '.join(names)}")
    given = {name: value for name, value in given.items() if value is not None}
    effort = given.pop("reasoning_effort", None)
    if effort is not None and effort not in efforts:
        raise TokenizerError(f"reasoning_effort: must be one of {', '.join(efforts)}, got {shown(effort)}")
    for name, value in given.items():
        if not isinstance(value, bool):
            raise TokenizerError(f"{name}: must be true or false, got {shown(value)}")
    asked = [given[name] for name in ("thinking", "enable_thinking") if name in given]
    thinking = effort != "none" and (any(asked) if asked else thinking)
    return ChatOptions(thinking, given.get("drop_thinking", True), effort == "max")
