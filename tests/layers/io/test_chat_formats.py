"""Prompts in the formats of DeepSeek's releases, which hold no Jinja template."""

import json
import re

import pytest
import tokenizers
from tokenizers import models

from dsa_layers.io.tokenizer import Tokenizer, TokenizerError
from tests.layers.io.chat_examples import ASSISTANT, BOS, CALLED, EOS, QUESTION, USER, V4, V32, call, says

EXAMPLES = [("deepseek_v32", *example) for example in V32] + [("deepseek_v4", *example) for example in V4]


@pytest.fixture
def make(tmp_path):
    def tokenizer(model_type, tokens=(BOS, EOS, USER, ASSISTANT), **config):
        made = tokenizers.Tokenizer(models.BPE())
        made.add_special_tokens(list(tokens))
        made.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        return Tokenizer(tmp_path)

    return tokenizer


@pytest.mark.parametrize(
    ("model_type", "messages", "arguments", "prompt"),
    [(kind, *rest) for kind, _, *rest in EXAMPLES],
    ids=[f"{kind}: {name}" for kind, name, *_ in EXAMPLES],
)
def test_prompts_are_those_written_by_hand(make, model_type, messages, arguments, prompt):
    assert make(model_type).apply_chat_template(messages, **arguments) == BOS + prompt


@pytest.mark.parametrize("model_type", ["deepseek_v32", "deepseek_v4"])
@pytest.mark.parametrize(
    ("messages", "arguments", "problem"),
    [
        ([], {}, "messages: must hold a message, got none"),
        ("Q", {}, "messages: must be a list, got 'Q'"),
        (["Q"], {}, "messages[0]: must be a mapping, got 'Q'"),
        ([says("bot", "Q")], {}, "messages[0]: role must be one of system, developer, user, assistant, tool"),
        ([says("user", None)], {}, "messages[0].content: must be a string or a list of text parts, got None"),
        ([says("user", [{"type": "image"}])], {}, 'messages[0].content[0]: must be {"type": "text", "text": ...}, got'),
        ([says("developer", "")], {}, "messages[0].content: must not be empty for a developer, got ''"),
        ([says("user", "Q", tools=[{"function": {}}])], {}, "messages[0].tools: must come with role system or develop"),
        (QUESTION, {"tools": [{"name": "f"}]}, "tools[0].function: must be a mapping, got None"),
        (QUESTION, {"tools": [{"function": {"f": {1}}}]}, "tools[0].function: must be JSON, got "),
        (QUESTION, {"think": True}, "think: is no option of this chat format; accepted: thinking, enable_thinking, "),
        (QUESTION, {"thinking": "no"}, "thinking: must be true or false, got 'no'"),
        ([says("assistant", "", tool_calls=[call(1, "")])], {}, "messages[0].tool_calls[0].function: must have a name"),
        ([says("assistant", "", tool_calls=[call("f", "[]")])], {}, "function.arguments: must be a JSON object, got ["),
    ],
)
def test_what_a_format_refuses(make, model_type, messages, arguments, problem):
    with pytest.raises(TokenizerError, match=re.escape(problem)):
        make(model_type).apply_chat_template(messages, **arguments)


@pytest.mark.parametrize(
    ("messages", "arguments", "problem"),
    [
        (CALLED[3:], {}, "messages[0]: a tool's result must follow the assistant's message that calls it"),
        ([*CALLED, says("tool", "3")], {}, "messages[5]: is result 3 of messages[2], which has 2 tool calls"),
        ([*QUESTION, says("assistant", "A")], {"thinking": True}, "messages[1]: must have reasoning_content or tool_c"),
        ([says("assistant", "", tool_calls=[call("f", "{")])], {}, "must be a JSON object, got text that is no JSON"),
        (QUESTION, {"reasoning_effort": "max"}, "reasoning_effort: is no option of this chat format"),
    ],
)
def test_what_only_deepseek_v32_refuses(make, messages, arguments, problem):
    with pytest.raises(TokenizerError, match=re.escape(problem)):
        make("deepseek_v32").apply_chat_template(messages, **arguments)
    make("deepseek_v4").apply_chat_template(messages, **arguments)


def test_deepseek_v4_refuses_an_effort_that_it_does_not_know(make):
    with pytest.raises(TokenizerError, match="reasoning_effort: must be one of none, high, max, got 'low'"):
        make("deepseek_v4").apply_chat_template(QUESTION, reasoning_effort="low")


def test_a_template_goes_before_the_format(make):
    tokenizer = make("deepseek_v32", chat_template="{{ tools[0] }} {{ mode }} {{ documents is none }}")
    assert tokenizer.apply_chat_template(QUESTION, tools=["f"], mode="fast") == "f fast True"


@pytest.mark.parametrize(
    ("model_type", "tokens", "has"),
    [
        ("deepseek_v32", (BOS, EOS, USER, ASSISTANT), True),
        ("deepseek_v32", (BOS, EOS, USER), False),
        ("glm_moe_dsa", (BOS, EOS, USER, ASSISTANT), False),
        ([], (BOS, EOS, USER, ASSISTANT), False),
    ],
)
def test_a_checkpoint_has_a_format_by_its_model_type_and_its_tokens(make, model_type, tokens, has):
    assert make(model_type, tokens).has_chat_template == has


def test_a_format_refuses_a_tokenizer_that_spells_its_tokens_out(make, tmp_path):
    """The vocabulary has them, but they are not added tokens, so a text is cut into smaller ones."""
    make("deepseek_v32")
    fields = json.loads((tmp_path / "tokenizer.json").read_text())
    fields |= {"added_tokens": []}
    fields["model"]["vocab"] = {token: i for i, token in enumerate([USER, ASSISTANT, BOS, EOS, *sorted({*USER})])}
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    told = "tokenizer.json: has no token <｜User｜>, which the chat format of deepseek_v32 needs"
    with pytest.raises(TokenizerError, match=re.escape(told)):
        _ = Tokenizer(tmp_path).has_chat_template
