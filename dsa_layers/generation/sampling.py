"""Sampling parameters of a sequence, and their defaults in a checkpoint's generation_config.json."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

from dsa.runtime.checks import check_flag, integer, number, shown
from dsa_layers.errors import ConfigError
from dsa_layers.io.directory import checkpoint_directory
from dsa_layers.untrusted_files import read_json_object

# Parameter name -> (type check, function that tells whether a value is accepted, description of accepted values)
_PARAMETERS: dict[str, tuple[Callable[[str, Any], Any], Callable[[Any], bool], str]] = {
    "max_tokens": (integer, lambda n: n >= 1, "at least 1"),
    "temperature": (number, lambda t: 0 <= t < math.inf, "a finite number of at least 0"),
    "top_k": (integer, lambda k: k >= 0, "at least 0 (0 keeps all tokens)"),
    "top_p": (number, lambda p: 0 < p <= 1, "above 0 and at most 1"),
    "seed": (integer, lambda seed: 0 <= seed < 2**63, "at least 0 and below 2^63"),
    "n": (integer, lambda n: 1 <= n <= 16384, "at least 1 and at most 16384"),  # vLLM's limit
    "min_p": (number, lambda p: 0 <= p <= 1, "at least 0 and at most 1"),
    # With a far smaller or larger penalty, logits would become infinite.
    "repetition_penalty": (number, lambda p: 0.001 <= p <= 1000, "above 0, from 0.001 to 1000"),
    "presence_penalty": (number, lambda p: -2 <= p <= 2, "at least -2 and at most 2"),
    "frequency_penalty": (number, lambda p: -2 <= p <= 2, "at least -2 and at most 2"),
    "logprobs": (integer, lambda n: n >= 0, "at least 0"),
}
_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # fields of generation_config.json
_MAX_BYTES = 2**20  # maximum size of generation_config.json


@dataclass(frozen=True)
class SamplingParams:
    """The parameters that control how a sequence is continued.

    max_tokens      the largest number of new tokens, including the end-of-sequence token
    temperature     the divisor of the logits. 0 is greedy decoding: the largest logit, ties to the lowest token id
    top_k           the number of likeliest tokens to sample from; 0 keeps all tokens
    top_p           nucleus sampling: sample from the likeliest of the tokens that min_p and top_k keep, the fewest
                    whose probabilities reach this fraction, above 0, of the sum over the kept tokens. 1 keeps all of
                    them
    seed            the seed of the sequence's random numbers. If one SamplingParams is for several prompts, sequence i
                    of the call uses seed + i. None: a random seed
    stop            strings that end the sequence and are not part of its text. `add_request`, `generate` and `stream`
                    refuse special tokens. A single string is accepted as one stop string. None: no stop strings
    n               the number of sequences per prompt. Sequence k of the prompt, from 0, uses seed + k. n > 1 requires
                    a temperature above 0
    min_p           the smallest probability of kept tokens, as a fraction of the largest probability; 0 keeps all
    repetition_penalty  for tokens in the prompt or the generated text: the divisor of positive logits and the factor of
                    negative logits; from 0.001 to 1000. 1 changes nothing
    frequency_penalty   a number that is subtracted from a token's logit once per generated occurrence; from -2 to 2
    presence_penalty    a number that is subtracted once from the logit of each generated token; from -2 to 2
    logprobs        the number of likeliest tokens whose log-probabilities are returned with each generated token, in
                    addition to the token's own. They are all computed from the model's logits, before penalties and
                    temperature. None: no log-probabilities

    The names are vLLM's. Penalties apply first, in greedy decoding too. Then temperature, min_p, top_k and top_p apply
    in this order. For a wrong parameter, the constructor raises TypeError or ValueError with its name.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    n: int = 1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, (checked, accepts, accepted) in _PARAMETERS.items():
            value = getattr(self, name)
            if value is None and name in ("seed", "logprobs"):
                continue
            value = checked(name, value)
            if not accepts(value):
                raise ValueError(f"{name}: must be {accepted}, got {shown(value)}")
            object.__setattr__(self, name, value)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n: must be 1 with temperature 0, which is greedy, got {self.n}")

    @property
    def of_likeliest(self) -> bool:
        """Whether top_k, top_p or min_p may exclude tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalises(self) -> bool:
        """Whether a penalty changes the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def with_seed(params: SamplingParams, plus: int) -> SamplingParams:
    """Return `params` with `plus` added to the seed, modulo 2^63. Without a seed, return `params`."""
    return params if params.seed is None or not plus else replace(params, seed=(params.seed + plus) % 2**63)


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(strings, Sequence) or not all(isinstance(text, str) for text in strings):
        raise TypeError(f"stop: must be a string or a list of strings, got {shown(stop)}")
    if "" in strings:
        raise ValueError("stop: must not be empty, got ''")
    return tuple(strings)


def sampling_defaults(directory: str | PathLike[str]) -> dict[str, Any]:
    """Return {field of SamplingParams: value} for the fields that a checkpoint's generation_config.json sets, among
    temperature, top_k, top_p, min_p and repetition_penalty. Without the file, return {}.

    directory  the checkpoint's directory or hub id

    "do_sample": false sets temperature to 0. "do_sample": true without a temperature sets temperature to 1, as in
    transformers. For malformed JSON or a value that is not accepted, raise ConfigError (a ValueError) with the file's
    name.
    """
    path = checkpoint_directory(directory, weights=False) / "generation_config.json"
    if not path.exists():
        return {}
    fields = read_json_object(path, ConfigError, _MAX_BYTES)
    found = {name: fields[name] for name in _DEFAULTS if fields.get(name) is not None}
    do_sample = fields.get("do_sample")
    try:
        if do_sample is not None:
            check_flag("do_sample", do_sample)
            found["temperature"] = found.get("temperature", 1.0) if do_sample else 0.0
        SamplingParams(**found)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: field {error}") from None
    return found
