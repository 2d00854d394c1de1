import json
from datetime import datetime

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers.utils.chat_template_utils import render_jinja_template

from dsa_layers.io.tokenizer import Tokenizer, TokenizerError

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
    config = {"bos_token": BOS, "eos_token": EOS, "add_bos_token": True, **config}
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


@pytest.mark.parametrize("form", [str, lambda text: {"__type": "AddedToken", "content": text, "lstrip": False}])
def test_special_tokens_as_text_or_object(tmp_path, form):
    tokenizer = make(tmp_path, bos_token=form(BOS), eos_token=form(EOS), pad_token=form(EOS))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)


def test_characters_without_a_token_are_told(tmp_path):
    make(tmp_path)
    fields = json.loads((tmp_path / "tokenizer.json").read_text())
    fields["model"] |= {"vocab": {"a": 0}, "merges": []}
    fields["pre_tokenizer"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    tokenizer = Tokenizer(tmp_path)
    with pytest.warns(UserWarning, match=r"tokenizer\.json: has no token for 'xyz': left out$"):
        assert len(tokenizer.encode(f"{USER}xay a{USER}z", add_bos=False)) == 4


@pytest.mark.filterwarnings("error")
def test_white_space_and_parts_of_characters_are_no_missing_tokens(tmp_path):
    trims = processors.ByteLevel(trim_offsets=True)
    assert make(tmp_path, trims).encode(" à  😀\n\tb " + TEXT)


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
        ("{{ raise_exception('only two roles') }}", "chat template: only two roles"),
        ("{{ messages[0]['name'] + 'x' }}", "chat template: .*has no attribute 'name'"),
        ("{{ messages[0]['content'] + none }}", "chat template: "),
        ("{{ ''.__class__.__mro__ }}", "chat template: .*unsafe"),
        ("{{ messages.append(1) }}", "chat template: .*'append' of 'list' object is unsafe"),
        ("a\n\n{% if %}", "chat template: line 3: Expected an expression, got 'end of statement block'$"),
        ("", "chat template: writes no text for these messages$"),
        ("{{ nothing }}", "chat template: writes no text for these messages$"),
        ("{{ '\\ud800' }}", "chat template: writes surrogates, which are not Unicode text$"),
    ],
)
def test_chat_template_failures(tmp_path, template, expected):
    tokenizer = make(tmp_path, chat_template=template)
    with pytest.raises(TokenizerError, match=rf"tokenizer_config\.json: {expected}"):
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


def test_a_block_of_a_reply_is_rendered_as_by_transformers(tmp_path):
    template = (
        "{% for m in messages %}\n  {% if m.role == 'assistant' %}\n  {% generation %}\n<{{ m.content }}>"
        "{% set x = 1 %}\n"
        "    {% endgeneration %}\n{{ x }}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    )
    expected, _ = render_jinja_template(conversations=[MESSAGES], chat_template=template)
    assert [make(tmp_path, chat_template=template).apply_chat_template(MESSAGES)] == expected


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
