"""The messages of a conversation."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dsa_layers.command.reply import Reply


@dataclass
class Conversation:
    """prompt_of: messages -> the prompt by the chat template or format; None without either: texts then follow each
    other, with a line break after each."""

    prompt_of: Callable[[list[dict[str, Any]]], str] | None
    system: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)

    def prompt(self, text: str) -> str:
        """The prompt with one more message of the user. Raises ValueError where a template refuses it."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, *self.messages, {"role": "user", "content": text}]
        if self.prompt_of is not None:
            return self.prompt_of(messages)
        return "".join(f"{message['content']}\n" for message in messages)

    def add(self, text: str, reply: Reply) -> None:
        """Add the user's message and the reply to it."""
        answer = {"role": "assistant", "content": reply.answer}
        if reply.reasoning:
            answer["reasoning_content"] = reply.reasoning
        self.messages += [{"role": "user", "content": text}, answer]
