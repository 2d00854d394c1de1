"""What a caller asks of a format besides the messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsa_layers.arguments import shown_json
from dsa_layers.errors import TokenizerError


@dataclass(frozen=True)
class ChatOptions:
    """thinking: the reply begins with reasoning. drop_thinking: leave out earlier reasoning and earlier messages of
    developers. max_effort: tell the model to reason as much as it can."""

    thinking: bool
    drop_thinking: bool = True
    max_effort: bool = False


def read_options(given: Mapping[str, Any], *, thinking: bool, efforts: Sequence[str] = ()) -> ChatOptions:
    """Read options by the names that engines use: thinking or enable_thinking (either turns it on), drop_thinking and,
    for a format with efforts, reasoning_effort. A value of None counts as not given.

    thinking  default of the option thinking
    efforts   accepted values of reasoning_effort; "none" turns thinking off, "max" sets max_effort
    Raises TokenizerError for another option or value.
    """
    names = ("thinking", "enable_thinking", "drop_thinking", *(("reasoning_effort",) if efforts else ()))
    for name in given:
        if name not in names:
            raise TokenizerError(f"{name}: is no option of this chat format; accepted: {', '.join(names)}")
    given = {name: value for name, value in given.items() if value is not None}
    effort = given.pop("reasoning_effort", None)
    if effort is not None and effort not in efforts:
        raise TokenizerError(f"reasoning_effort: must be one of {', '.join(efforts)}, got {shown_json(effort)}")
    for name, value in given.items():
        if not isinstance(value, bool):
            raise TokenizerError(f"{name}: must be true or false, got {shown_json(value)}")
    asked = [given[name] for name in ("thinking", "enable_thinking") if name in given]
    thinking = effort != "none" and (any(asked) if asked else thinking)
    return ChatOptions(thinking, given.get("drop_thinking", True), effort == "max")
