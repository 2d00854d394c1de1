"""The tokenizer of a tiny checkpoint: trained here, with a chat template where the model's releases have one."""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from dsa_layers.io.chat_formats import FORMATS

_BOS, _EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_USER, _ASSISTANT = "<｜User｜>", "<｜Assistant｜>"

_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ '" + _USER + "' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '" + _ASSISTANT + "' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('role ' + message['role'] + ' is not supported') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '" + _ASSISTANT + "' }}"
    "{% if enable_thinking is defined %}{{ '<think>' if enable_thinking else '</think>' }}{% endif %}{% endif %}"
)


def tokenizer_config(model_type: str, max_length: int) -> dict[str, Any]:
    """The fields of tokenizer_config.json. max_length: of the model's context, in tokens. The releases of models that
    have a chat format of their own hold no template."""

    def token(content: str) -> dict[str, Any]:
        flags = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
        return {"__type": "AddedToken", "content": content, **flags}

    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": token(_BOS),
        "clean_up_tokenization_spaces": False,
        "eos_token": token(_EOS),
        "model_max_length": max_length,
        "pad_token": token(_EOS),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
        **({} if model_type in FORMATS else {"chat_template": _CHAT_TEMPLATE}),
    }


def train_tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer, as DeepSeek's is: any text can be written in it. BOS is 0 and EOS is 1."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_BOS, _EOS, _USER, _ASSISTANT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([path.read_text(encoding="utf-8") for path in _corpus()], trainer)
    return tokenizer


def _corpus() -> list[Path]:
    package = Path(__file__).resolve().parent.parent
    root = package.parent
    if not (root / "pyproject.toml").exists():
        return sorted(package.rglob("*.py"))
    sources = ("dsa", "dsa_layers")
    return sorted(
        [
            *root.glob("*.md"),
            *(root / "docs").rglob("*.md"),
            *(path for s in sources for path in (root / s).rglob("*.py")),
        ]
    )
