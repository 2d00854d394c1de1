"""Chat formats of models whose releases have no Jinja template but an encoder in Python: a module each."""

from collections.abc import Callable

from dsa_layers.io.chat_formats.deepseek_v4 import deepseek_v4
from dsa_layers.io.chat_formats.deepseek_v32 import deepseek_v32
from dsa_layers.io.chat_formats.markup import NEEDED

# Maps model_type to a function: (messages, tools, options, *, add_generation_prompt) -> the prompt.
ChatFormat = Callable[..., str]
FORMATS: dict[str, ChatFormat] = {"deepseek_v32": deepseek_v32, "deepseek_v4": deepseek_v4}

__all__ = ["FORMATS", "NEEDED", "ChatFormat"]
