"""JSON objects whose fields are taken by name and checked, so that none goes unread."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Fields with no influence on inference: where the file came from, how training ran, what a forward returns by default.
NO_INFLUENCE = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "aux_loss_alpha",
        "initializer_range",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "return_dict",
        "router_aux_loss_coef",
        "seq_aux",
        "transformers_version",
        "use_cache",
    }
)


class ConfigError(ValueError):
    """A configuration that cannot be used. The message names the file, the field, its value and what is accepted."""


_REQUIRED = object()


class Fields:
    """A JSON object whose fields are taken by name and checked; what was never taken can be rejected by its name.

    A field without a default must be there. null counts as absent, for writers disagree on whether to write it.
    """

    def __init__(self, values: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self._values = values
        self._path = path
        self._prefix = prefix
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def error(self, name: str, problem: str, accepted: str) -> ConfigError:
        return ConfigError(f"{self._path}: field '{self._prefix}{name}' {problem}; accepted: {accepted}")

    def _take(self, name: str, default: Any, accepted: str) -> Any:
        self._taken.add(name)
        value = self._values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.error(name, "is null" if name in self._values else "is missing", accepted)
        return default

    def one_of(self, name: str, accepted: tuple, default: Any = _REQUIRED) -> Any:
        listed = ", ".join(map(repr, accepted))
        value = self._take(name, default, listed)
        if name not in self:
            return value
        # 0 == False in Python, but not in a configuration.
        if not any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in accepted):
            raise self.error(name, f"is {value!r}", listed)
        return value

    def boolean(self, name: str) -> bool:
        return self.one_of(name, (True, False))

    def integer(self, name: str, minimum: int = 1, default: Any = _REQUIRED) -> int:
        accepted = f"an integer of at least {minimum}"
        value = self._take(name, default, accepted)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(name, f"is {value!r}", accepted)
        return value

    def positive(self, name: str, default: Any = _REQUIRED) -> float:
        accepted = "a finite number above 0"
        value = self._take(name, default, accepted)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            raise self.error(name, f"is {value!r}", accepted)
        return float(value)

    def strings(self, name: str) -> tuple[str, ...]:
        """The strings in a list; () for null."""
        value = self._take(name, None, "")
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise self.error(name, f"is {value!r}", "a list of strings, or null")
        return tuple(value or ())

    def each_of(self, name: str, accepted: tuple[str, ...], count: int) -> tuple[str, ...] | None:
        """The `count` items of a list, or letters of a string, each of them one of `accepted`; None for null."""
        listed = f"{count} items, each one of {', '.join(map(repr, accepted))}, or null"
        value = self._take(name, None, listed)
        if value is None:
            return None
        if not isinstance(value, list | str):
            raise self.error(name, f"is {value!r}", listed)
        if len(value) != count:
            raise self.error(name, f"has {len(value)} items", listed)
        for item in value:
            if item not in accepted:
                raise self.error(name, f"holds {item!r}", listed)
        return tuple(value)

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """The ids of a field that holds an integer, a list of them, or null."""
        value = self._take(name, None, "")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
                raise self.error(name, f"is {value!r}", f"token ids in [0, vocab_size={vocab_size}), or null")
        return tuple(ids)

    def items(self, name: str) -> list[Any] | None:
        value = self._take(name, None, "")
        if value is not None and not isinstance(value, list):
            raise self.error(name, f"is {value!r}", "a list or null")
        return value

    def object(self, name: str) -> "Fields | None":
        value = self._take(name, None, "")
        if value is not None and not isinstance(value, dict):
            raise self.error(name, f"is {value!r}", "an object or null")
        return None if value is None else Fields(value, self._path, f"{self._prefix}{name}.")

    def reject_unread(self, ignored: frozenset[str] = frozenset()) -> None:
        for name in self._values:
            if name not in self._taken and name not in ignored:
                raise ConfigError(
                    f"{self._path}: field '{self._prefix}{name}' is not supported: it is neither read nor known to "
                    f"have no influence on inference (got {self._values[name]!r})"
                )


def read_object(path: Path) -> Fields:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a checkpoint directory holds a config.json") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return Fields(value, path)
