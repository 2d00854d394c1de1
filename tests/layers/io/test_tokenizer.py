"""Tokenizers and chat templates of checkpoints, including damaged and malicious ones."""

import json
import re
from datetime import datetime

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from dsa_layers import tiny
from dsa_layers.io.tokenizer import Tokenizer, TokenizerError
from tests.layers.io.chat_examples import BOS, EOS
from tests.layers.io.stand_ins import LFS_POINTER
from tests.layers.layers.calls import record
from tests.reference.common import assert_refused

TEXT = "The lightning indexer scores every key; the top k of them are attended to. The keys are scored by the indexer."
MESSAGES = [{"role": "user", "content": "a < b & 'c'"}, {"role": "assistant", "content": "oui, à 😀"}]


def make(directory, post_processor=None, **config):
    tokenizer = tokenizers.Tokenizer.from_str(tiny.train_tokenizer(300).to_str())
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": {"__type": "AddedToken", "content": EOS}, "add_bos_token": True, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(directory)


def test_a_text_is_decoded_as_it_was_encoded(tmp_path):
    tokenizer = make(tmp_path)
    ids = tokenizer.encode(TEXT)
    assert ids[0] == tokenizer.bos_token_id == 0 and tokenizer.eos_token_id == 1
    assert tokenizer.encode(TEXT, add_bos=False) == ids[1:] and 0 not in ids[1:]
    assert tokenizer.decode([*ids, 1]) == TEXT
    assert tokenizer.vocab_size == 300 and tokenizer.decode([10**6]) == ""


def test_bos_never_comes_twice(tmp_path):
    plain = make(tmp_path).encode(TEXT)
    adds_both = processors.TemplateProcessing(single=f"{BOS} $A {EOS}", special_tokens=[(BOS, 0), (EOS, 1)])
    tokenizer = make(tmp_path, adds_both)
    assert tokenizer.encode(TEXT) == tokenizer.encode(BOS + TEXT) == plain
    assert tokenizer.encode(TEXT, add_bos=False) == plain[1:]


def test_a_chat_template_is_rendered_as_transformers_does(tmp_path):
    template = (
        "{{ bos_token }}{% for m in messages %}\n"
        "    {% if m.role == 'user' %}\n"
        "<U>{{ m.content }}{% else %}\n"
        "<A>{{ m.content }}{{ eos_token }}{% break %}{% endif %}\n"
        "    {% endfor %}\n"
        "{% generation %}{% set y = 5 %}{{ {'é': '<'} | tojson(false, none, [',', ':']) }}{% endgeneration %}{{ y }}"
        "{{ strftime_now('%Y') }}{{ pad_token }}{% if add_generation_prompt %}<A>{% endif %}"
    )
    tokenizer = make(tmp_path, chat_template=template, pad_token=None)
    # transformers sets trim_blocks and lstrip_blocks: no line breaks after block tags, and no indents before them
    expected = f"{BOS}<U>a < b & 'c'<A>oui, à 😀{EOS}" + '{"é":"<"}' + str(datetime.now().year)
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False) == expected
    assert tokenizer.apply_chat_template(MESSAGES) == expected + "<A>"
    ids = tokenizer.encode(tokenizer.apply_chat_template(MESSAGES))
    assert tokenizer.has_chat_template and ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ raise_exception('x' * 100000) }}", "x{500}$"),
        ("{{ cycler.__init__.__globals__.os }}", ".*unsafe"),
        ("{% include '/etc/passwd' %}", "TypeError: no loader for this environment"),
        ("a\n\n{% if %}", "line 3: Expected an expression, got 'end of statement block'$"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ],
)
def test_a_chat_template_that_fails_is_an_error(tmp_path, template, expected):
    tokenizer = make(tmp_path, chat_template=template)
    with pytest.raises(TokenizerError, match=rf"tokenizer_config\.json: chat template: {expected}"):
        tokenizer.apply_chat_template(MESSAGES)


def test_the_chat_template_s_file_goes_before_the_configuration(tmp_path):
    tokenizer = make(tmp_path)
    assert not tokenizer.has_chat_template
    told = r"tokenizer_config\.json: holds no chat_template, .* chat_template\.jinja"
    assert_refused(told, tokenizer.apply_chat_template, MESSAGES)
    (tmp_path / "chat_template.jinja").write_text("by file")
    assert make(tmp_path, chat_template="by config").apply_chat_template([]) == "by file"
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    broken = Tokenizer(tmp_path)  # no error, because the template is not used yet
    assert_refused(r"chat_template\.jinja: chat template: ", broken.apply_chat_template, [])


def test_a_misspelt_variable_of_a_template_is_refused(tmp_path):
    template = "{{ bos_token }}{% for m in messages %}{% set n = m.content %}{{ n if thinking else '' }}{% endfor %}"
    render = make(tmp_path, chat_template=template).apply_chat_template
    assert render(MESSAGES, thinking=False) != render(MESSAGES, thinking=True)
    told = "^thinkin: is no variable of the chat template; accepted: thinking$"
    assert_refused(told, render, MESSAGES, thinkin=True)
    render = make(tmp_path, chat_template="{{ messages }}").apply_chat_template
    assert_refused("accepted: none$", render, MESSAGES, n=True)


PARTS = ["a", "▁", "▁a", "▁▁ b", "  ", "##b", ".", "n't", "Ġa", "ðŁ", "Ķ", "¥", "â", "Ĥ", "ï¿½", "\ufffd", ""]
TOKENS = list(dict.fromkeys([*PARTS, " ", *sorted(pre_tokenizers.ByteLevel.alphabet())]))
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
DECODERS = {
    "none": None,
    "byte level": decoders.ByteLevel(),
    "Metaspace": decoders.Metaspace(),
    "each token stripped": decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
}
# Prefer tokens of PARTS, which join to words and characters. Of the two ids after TOKENS, the first is a special token
# and the second is no token.
ID = st.sampled_from([*range(len(PARTS))]) | st.integers(0, len(TOKENS) + 1)


def word_level(directory, decoder, tokens=TOKENS):
    tokenizer = tokenizers.Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="a"))
    tokenizer.add_special_tokens(["<end>"])
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return Tokenizer(directory)


def pieces(tokenizer, ids):
    stream = tokenizer.stream()
    return [stream.push(token_id) for token_id in ids] + [stream.flush()]


@pytest.fixture(scope="module", params=DECODERS)
def decoding(request, tmp_path_factory):
    return word_level(tmp_path_factory.mktemp("tokenizer"), DECODERS[request.param])


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(ID, max_size=20))
def test_joined_pieces_are_the_decoded_text(decoding, ids):
    assert "".join(pieces(decoding, ids)) == decoding.decode(ids)


def test_text_is_returned_when_its_characters_are_complete(tmp_path):
    tokenizer = word_level(tmp_path, decoders.ByteLevel())
    ids = [TOKENS.index(token) for token in ["ðŁ", "Ķ", "¥", "a", "Ġa", "â", "a", "â"]]
    assert pieces(tokenizer, ids) == ["", "", "🔥", "a", " a", "", "\ufffda", "", "\ufffd"]
    fallback = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = word_level(tmp_path, decoders.Sequence([fallback, decoders.Strip(" ", 1, 0)]), [*BYTES, "▁a"])
    assert pieces(tokenizer, [256, *"🔥".encode(), 256, 0xFF, 256]) == ["a", "", "", "", "🔥", " a", "", "\ufffd a", ""]


def test_the_work_per_token_does_not_grow_with_the_text(tmp_path, monkeypatch):
    tokenizer = word_level(tmp_path, decoders.ByteLevel())
    longest = record(monkeypatch, "decode", seen=lambda self, ids: len(ids), owner=Tokenizer)
    pieces(tokenizer, [TOKENS.index(token) for token in ["ðŁ", "Ķ", "¥", "a"] * 100])
    assert max(longest) <= 6


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
@pytest.mark.parametrize("content", [LFS_POINTER, b"\xff\xfe", b'{"a":' * 100_000, b'{"half": '])
def test_a_damaged_file_is_named(tmp_path, name, content):
    small(tmp_path)
    path = tmp_path / name
    path.write_bytes(b"{{" * (name[0] == "c") + content)
    with pytest.raises(TokenizerError, match=re.escape(str(path))):
        Tokenizer(tmp_path).apply_chat_template([])


def test_what_the_tokenizers_library_refuses_is_an_error(tmp_path, capfd):
    vocab = {"é": 0, "b": 1}  # the library panics
    model = {"type": "BPE", "vocab": vocab, "merges": [["é", "b"]], "continuing_subword_prefix": "éé"}
    assert_refused(r"tokenizer\.json: not a tokenizer: ", small, tmp_path, {"model": model})
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}
    tokenizer = small(tmp_path, {"model": model})
    assert_refused(r"tokenizer\.json: cannot encode a text of 1 characters: ", tokenizer.encode, "b")


def test_truncation_is_not_applied(tmp_path):
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    assert small(tmp_path, {"truncation": truncation}).encode("abba") == [2, 1, 0]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"bos_token": 1}, "bos_token is 1; accepted: a string"),
        ({"bos_token": {"content": []}}, "bos_token is {'content': \\[\\]}; accepted"),
        ({"eos_token": "x" * 100_000}, "eos_token 'xxx.*' is no token of"),
        ({"chat_template": {"default": "x"}}, "chat_template is {'default': 'x'}"),
    ],
)
def test_wrong_tokenizer_configs_are_refused(tmp_path, config, expected):
    with pytest.raises(TokenizerError, match=expected) as error:
        small(tmp_path, **config)
    assert len(str(error.value)) < 2000
