"""What a stranger's tokenizer and chat template can hold ends in one clear error, soon and in little memory."""

import json
import os
import re

import pytest
from hypothesis import given

from dsa_layers.io.chat_template import ChatTemplate, ChatTemplateError
from dsa_layers.io.tokenizer import Tokenizer, TokenizerError
from tests.layers.io.damage import damaged, examples, torn
from tests.layers.io.hostile_files import HUGE, LFS_POINTER

SMALL_TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
}


def tokenizer(directory, changes=None, **config):
    (directory / "tokenizer.json").write_text(json.dumps(SMALL_TOKENIZER | (changes or {})))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(directory)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (LFS_POINTER, "is a git-LFS pointer"),
        (b"\xff\xfe", "cannot be read: 'utf-8' codec"),
        (b"[" * 100_000, "not a tokenizer: |not valid JSON: it is nested too deeply"),
        (b"{" * 100_000, "not a tokenizer: |not valid JSON: "),
        (b'{"a":' * 100_000, "not a tokenizer: |not valid JSON: it is nested too deeply"),
        (b"9" * 100_000, "not a tokenizer: |not valid JSON: Exceeds the limit"),
    ],
)
def test_tokenizer_files(tmp_path, name, content, expected):
    tokenizer(tmp_path)
    if name == "chat_template.jinja" and content[:1] not in (b"v", b"\xff"):
        content, expected = b"{{" + content, "chat template: "
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=expected) as error:
        Tokenizer(tmp_path).apply_chat_template([])
    assert str(tmp_path / name) in str(error.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_tokenizer_files_beyond_any_size(tmp_path, name):
    tokenizer(tmp_path)
    if name == "chat_template.jinja":
        (tmp_path / name).symlink_to("/dev/zero")
    else:
        os.truncate(tmp_path / name, 2**40)
    with pytest.raises(TokenizerError, match=r"accepted: at most|it is no regular file"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizer_files_that_are_missing_or_cut_short(tmp_path, name):
    tokenizer(tmp_path)
    (tmp_path / name).write_text('{"half": ')
    with pytest.raises(TokenizerError, match=re.escape(f"{tmp_path / name}: not ")):
        Tokenizer(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(TokenizerError, match=re.escape(f"{tmp_path / name}: no such file")):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("target", ["nothing", "chat_template.jinja"])
def test_a_template_that_is_a_link_to_nothing(tmp_path, target):
    """As of a download that was interrupted: not the template of tokenizer_config.json in its place."""
    (tmp_path / "chat_template.jinja").symlink_to(target)
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja: (no such file|cannot be read)"):
        tokenizer(tmp_path, chat_template="x")


def test_a_tokenizer_of_too_many_values(tmp_path):
    tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model":[' + "[]," * 3_000_000)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: holds too many values; accepted: at most 3000000"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        # These make the library panic: what it raises then is no Exception.
        {
            "model": {
                "type": "BPE",
                "vocab": {"é": 0, "b": 1},
                "merges": [["é", "b"]],
                "continuing_subword_prefix": "éé",
            }
        },
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"model": {"type": "Unigram", "unk_id": 10**9, "vocab": [["a", 0.0]]}},
        {"model": {"type": "BPE", "vocab": {"a": HUGE}, "merges": []}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}},
        {"model": None},
        {"added_tokens": [[]]},
    ],
)
def test_tokenizers_that_cannot_be(tmp_path, changes, capfd):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a tokenizer: "):
        tokenizer(tmp_path, changes)


def replace(pattern, content):
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_a_tokenizer_that_fills_the_memory(tmp_path, part):
    """10,000 of these make 10^10000 letters of one."""
    steps = "normalizers" if part == "normalizer" else "decoders"
    bomb = {"type": "Sequence", steps: [replace("a", "a" * 10)] * 10_000}
    with pytest.raises(TokenizerError, match=f"its {part} can make a text inf times as long; accepted: at most"):
        tokenizer(tmp_path, {part: bomb})
    with pytest.raises(TokenizerError, match="its normalizer can make a text 100001 times as long"):
        tokenizer(tmp_path, {"normalizer": {"type": "Prepend", "prepend": "a" * 100_000}})
    harmless = tokenizer(tmp_path, {part: {"type": "Sequence", steps: [replace("b", "a"), replace(" ", "")]}})
    assert harmless.decode(harmless.encode("ab")) in ("a a", "aa")


def test_a_tokenizer_that_cannot_encode(tmp_path):
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: cannot encode a text of 1 characters: "):
        tokenizer(tmp_path, {"model": model}).encode("b")


def test_padding_and_truncation_are_not_applied(tmp_path):
    """A fixed length of 10^12 would be that many tokens; a truncated prompt would be another prompt."""
    padding = {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    assert tokenizer(tmp_path, {"padding": padding, "truncation": truncation}).encode("abba") == [2, 1, 0]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"bos_token": 1}, "bos_token is 1; accepted: a string"),
        ({"add_bos_token": 3}, "add_bos_token is 3; accepted: true, false or null"),
        ({"add_eos_token": "foo"}, "add_eos_token is 'foo'; accepted: true, false or null"),
        ({"bos_token": True}, "bos_token is true; accepted: a string"),
        ({"bos_token": 0.0}, r"bos_token is 0\.0; accepted: a string"),
        ({"bos_token": []}, r"bos_token is \[\]; accepted: a string"),
        ({"bos_token": {"content": []}}, "bos_token is {'content': \\[\\]}; accepted"),
        ({"eos_token": "\ud800"}, "eos_token '\\\\ud800' cannot be looked up"),
        ({"eos_token": "x" * 100_000}, "eos_token 'xxx.*' is no token of"),
        ({"chat_template": [{"name": [], "template": "x"}]}, r"chat_template names \[\[\]\]"),
        ({"chat_template": [{"name": "rag", "template": "x"}]}, r"names \['rag'\]; accepted: a list with 'default'"),
        ({"chat_template": {"default": "x"}}, "chat_template is {'default': 'x'}"),
    ],
)
def test_tokenizer_configs(tmp_path, config, expected):
    with pytest.raises(TokenizerError, match=expected) as error:
        tokenizer(tmp_path, **config)
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError: Range too big"),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "writes more than 524424 characters"),
        ("{{ 'ab ba' * 150000 }}", "writes more than 524424 characters"),
        ("{{ 'x' * 10**17 }}", "needs more memory than there is"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "is nested too deeply"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "is nested too deeply"),
        ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "is nested too deeply"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ {}['a']['b'] }}", "has no attribute 'a'"),
        ("{{ messages | map('nope') | list }}", "No filter named 'nope'"),
        ("{% include '/etc/passwd' %}", "no loader for this environment"),
        ("{{ raise_exception('\x1b[2J' * 100000) }}", r"^(\[2J)+\[?2?$"),
    ],
)
def test_templates(template, expected):
    with pytest.raises(ChatTemplateError, match=expected) as error:
        ChatTemplate(template).render({"messages": [1]})
    assert len(str(error.value)) <= 500


def test_what_templates_are_given():
    render = ChatTemplate("{{ messages }}").render
    assert render({"messages": ({"role": "\ud800é\0"},)}) == "[{'role': '\\ud800é\\x00'}]"
    with pytest.raises(ChatTemplateError, match=r"cannot be given its variables: must be made of .*, got object"):
        render({"messages": object()})
    circle = []
    circle.append(circle)
    with pytest.raises(ChatTemplateError, match="cannot be given its variables: Circular reference"):
        render({"messages": circle})


def test_long_messages_are_no_endless_template():
    messages = [{"role": "user", "content": "é" * 3_000_000}]
    text = ChatTemplate("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}").render(
        {"messages": messages}
    )
    assert text == "é" * 6_000_000


@pytest.mark.parametrize(
    "reached", ["''.__class__.__mro__", "raise_exception.__globals__.json", "cycler.__init__.__globals__.os"]
)
def test_a_template_cannot_reach_python(reached):
    with pytest.raises(ChatTemplateError, match="unsafe"):
        ChatTemplate(f"{{{{ {reached} }}}}").render({})


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
