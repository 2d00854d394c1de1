"""Tokenizers and chat templates of checkpoints, and those that a stranger could have written."""

import json
import re
from datetime import datetime

import pytest
import tokenizers
from hypothesis import given
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from dsa_layers.io.tokenizer import Tokenizer, TokenizerError
from tests.layers.io.damage import HUGE, LFS_POINTER, damaged, examples, torn

BOS, EOS, USER = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>"
TEXT = "The lightning indexer scores every key; the top k of them are attended to. The keys are scored by the indexer."
MESSAGES = [{"role": "user", "content": "a < b & 'c'"}, {"role": "assistant", "content": "oui, à 😀"}]


def byte_level(post_processor=None):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_tokens([tokenizers.AddedToken(USER, special=False, normalized=False)])
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    return tokenizer


def make(directory, post_processor=None, **config):
    byte_level(post_processor).save(str(directory / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": {"__type": "AddedToken", "content": EOS}, "add_bos_token": True, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(directory)


@pytest.fixture
def tokenizer(tmp_path):
    return make(tmp_path)


def test_encode_and_decode(tokenizer):
    ids = tokenizer.encode(TEXT)
    assert ids[0] == tokenizer.bos_token_id == 0 and tokenizer.eos_token_id == 1
    assert tokenizer.encode(TEXT, add_bos=False) == ids[1:] and 0 not in ids[1:]
    assert tokenizer.decode([*ids, 1]) == TEXT
    assert tokenizer.vocab_size == 301 and tokenizer.decode([10**6]) == ""


def test_bos_never_comes_twice(tmp_path):
    plain = make(tmp_path).encode(TEXT)
    adds_both = processors.TemplateProcessing(single=f"{BOS} $A {EOS}", special_tokens=[(BOS, 0), (EOS, 1)])
    tokenizer = make(tmp_path, adds_both)
    assert tokenizer.encode(TEXT) == plain
    assert tokenizer.encode(TEXT, add_bos=False) == plain[1:]
    assert tokenizer.encode(BOS + TEXT) == plain


def test_chat_template(tmp_path):
    template = (
        "{{ bos_token }}{% for m in messages %}\n"
        "    {% if m.role == 'user' %}\n"
        "<U>{{ m.content }}{% else %}\n"
        "<A>{{ m.content }}{{ eos_token }}{% endif %}\n"
        "    {% endfor %}\n"
        "{% if add_generation_prompt %}<A>{% endif %}"
    )
    tokenizer = make(tmp_path, chat_template=template)
    assert tokenizer.has_chat_template
    # trim_blocks and lstrip_blocks: the template's own line breaks and indents are not in the prompt.
    expected = f"{BOS}<U>a < b & 'c'<A>oui, à 😀{EOS}"
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False) == expected
    assert tokenizer.apply_chat_template(MESSAGES) == expected + "<A>"
    ids = tokenizer.encode(tokenizer.apply_chat_template(MESSAGES))
    assert ids.count(tokenizer.bos_token_id) == 1


def test_chat_template_helpers(tmp_path):
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{{ strftime_now('%Y') }}{{ pad_token }}"
    )
    tokenizer = make(tmp_path, chat_template=template, pad_token=None)
    year = str(datetime.now().year)
    assert tokenizer.apply_chat_template(MESSAGES) == '{"role": "user", "content": "a < b & \'c\'"}' + year
    assert make(tmp_path, chat_template="{{ 'à' | tojson }}").apply_chat_template([]) == '"à"'


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ raise_exception('only two roles') }}", "only two roles$"),
        ("{{ raise_exception('x' * 100000) }}", "x{500}$"),
        ("{{ messages[0]['name'] + 'x' }}", ".*has no attribute 'name'"),
        ("{{ cycler.__init__.__globals__.os }}", ".*unsafe"),
        ("{{ messages.append(1) }}", ".*'append' of 'list' object is unsafe"),
        ("{% include '/etc/passwd' %}", "TypeError: no loader for this environment"),
        ("a\n\n{% if %}", "line 3: Expected an expression, got 'end of statement block'$"),
        ("{{ 'x' * 10**17 }}", "MemoryError: "),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ],
)
def test_chat_template_failures(tmp_path, template, expected):
    tokenizer = make(tmp_path, chat_template=template)
    with pytest.raises(TokenizerError, match=rf"tokenizer_config\.json: chat template: {expected}"):
        tokenizer.apply_chat_template(MESSAGES)


def test_where_the_chat_template_is(tmp_path):
    tokenizer = make(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(
        TokenizerError, match=r"tokenizer_config\.json: holds no chat_template, .* chat_template\.jinja"
    ):
        tokenizer.apply_chat_template(MESSAGES)
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "by name"}]
    assert make(tmp_path, chat_template=named).apply_chat_template([]) == "by name"
    (tmp_path / "chat_template.jinja").write_text("by file")
    assert make(tmp_path, chat_template="by config").apply_chat_template([]) == "by file"
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    broken = Tokenizer(tmp_path)  # for whom uses no template
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja: chat template: "):
        broken.apply_chat_template([])


def test_a_misspelt_variable_of_a_template(tmp_path):
    template = "{{ bos_token }}{% for m in messages %}{% set n = m.content %}{{ n if thinking else '' }}{% endfor %}"
    tokenizer = make(tmp_path, chat_template=template)
    assert tokenizer.apply_chat_template(MESSAGES, thinking=False) != tokenizer.apply_chat_template(
        MESSAGES, thinking=True
    )
    with pytest.raises(TokenizerError, match=r"^thinkin: is no variable of the chat template; accepted: thinking$"):
        tokenizer.apply_chat_template(MESSAGES, thinkin=True)
    with pytest.raises(TokenizerError, match=r"accepted: none$"):
        make(tmp_path, chat_template="{{ messages }}").apply_chat_template(MESSAGES, n=True)


# Files that a stranger could have written.


SMALL_TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
}


def small(directory, changes=None, **config):
    (directory / "tokenizer.json").write_text(json.dumps(SMALL_TOKENIZER | (changes or {})))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(directory)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("content", [LFS_POINTER, b"\xff\xfe", b'{"a":' * 100_000, b'{"half": ', None])
def test_a_damaged_file_is_named(tmp_path, name, content):
    small(tmp_path)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    path.symlink_to("nowhere") if content is None else path.write_bytes(b"{{" * (name[0] == "c") + content)
    with pytest.raises(TokenizerError, match=re.escape(str(path))):
        Tokenizer(tmp_path).apply_chat_template([])


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_missing_file_is_named(tmp_path, name):
    small(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(TokenizerError, match=re.escape(f"{tmp_path / name}: no such file; a checkpoint needs it")):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        # The library panics: the exception is no subclass of Exception.
        {
            "model": {
                "type": "BPE",
                "vocab": {"é": 0, "b": 1},
                "merges": [["é", "b"]],
                "continuing_subword_prefix": "éé",
            }
        },
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"model": {"type": "BPE", "vocab": {"a": HUGE}, "merges": []}},
        {"model": None},
    ],
)
def test_tokenizers_that_cannot_be(tmp_path, changes, capfd):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a tokenizer: "):
        small(tmp_path, changes)


def test_a_tokenizer_that_cannot_encode(tmp_path):
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: cannot encode a text of 1 characters: "):
        small(tmp_path, {"model": model}).encode("b")


def test_truncation_is_not_applied(tmp_path):
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    assert small(tmp_path, {"truncation": truncation}).encode("abba") == [2, 1, 0]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"bos_token": 1}, "bos_token is 1; accepted: a string"),
        ({"bos_token": {"content": []}}, "bos_token is {'content': \\[\\]}; accepted"),
        ({"eos_token": "\ud800"}, "eos_token '\\\\ud800' cannot be looked up"),
        ({"eos_token": "x" * 100_000}, "eos_token 'xxx.*' is no token of"),
        ({"chat_template": [{"name": "rag", "template": "x"}]}, "accepted: a string or a list of named strings"),
        ({"chat_template": {"default": "x"}}, "chat_template is {'default': 'x'}"),
    ],
)
def test_tokenizer_configs(tmp_path, config, expected):
    with pytest.raises(TokenizerError, match=expected) as error:
        small(tmp_path, **config)
    assert len(str(error.value)) < 2000


@examples
@given(
    damaged(SMALL_TOKENIZER) | torn(json.dumps(SMALL_TOKENIZER).encode()),
    damaged({"bos_token": "a", "eos_token": {"content": "b"}}),
)
def test_damaged_tokenizers(tmp_path, content, config):
    (tmp_path / "tokenizer.json").write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    try:
        damaged_one = Tokenizer(tmp_path)
        assert isinstance(damaged_one.decode(damaged_one.encode("abba")), str)
    except TokenizerError:
        pass
