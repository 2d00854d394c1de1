"""Ids decoded one by one give the text of all ids."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from dsa_layers.io.tokenizer import Tokenizer

PARTS = ["a", "▁", "▁a", "▁▁ b", "  ", "##b", ".", "n't", "Ġa", "ðŁ", "Ķ", "¥", "â", "Ĥ", "ï¿½", "\ufffd", ""]
TOKENS = list(dict.fromkeys([*PARTS, " ", *sorted(pre_tokenizers.ByteLevel.alphabet())]))
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
DECODERS = {
    "none": None,
    "byte level": decoders.ByteLevel(),
    "byte level, stripped": decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
    "Metaspace": decoders.Metaspace(),
    "WordPiece": decoders.WordPiece(),
    "each token stripped": decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
    "BPE": decoders.BPEDecoder(suffix="a"),
}
# Half of the ids make words and characters together. The last two are a special token and no token.
ID = st.sampled_from([*range(len(PARTS))]) | st.integers(0, len(TOKENS) + 1)


@pytest.fixture(scope="module", params=DECODERS)
def tokenizer(request, tmp_path_factory):
    return make(tmp_path_factory.mktemp("tokenizer"), DECODERS[request.param], TOKENS)


def make(directory, decoder, tokens):
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


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(ID, max_size=20))
def test_joined_pieces_are_the_decoded_text(tokenizer, ids):
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_text_is_returned_when_its_characters_are_complete(tmp_path):
    tokenizer = make(tmp_path, decoders.ByteLevel(), TOKENS)
    ids = [TOKENS.index(token) for token in ["ðŁ", "Ķ", "¥", "a", "Ġa", "â", "a", "â"]]
    assert pieces(tokenizer, ids) == ["", "", "🔥", "a", " a", "", "\ufffda", "", "\ufffd"]
    fallback = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = make(tmp_path, decoders.Sequence([fallback, decoders.Strip(" ", 1, 0)]), [*BYTES, "▁a"])
    assert pieces(tokenizer, [256, *"🔥".encode(), 256, 0xFF, 256]) == ["a", "", "", "", "🔥", " a", "", "\ufffd a", ""]


def test_a_decoder_starts_anew_after_flush(tmp_path):
    stream = make(tmp_path, decoders.Metaspace(), TOKENS).stream()
    for _ in range(2):
        assert [stream.push(TOKENS.index("▁a")), stream.push(TOKENS.index("▁a")), stream.flush()] == ["a", " a", ""]


def test_the_work_per_token_does_not_grow_with_the_text(tmp_path, monkeypatch):
    tokenizer, longest = make(tmp_path, decoders.ByteLevel(), TOKENS), []
    decode = Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: longest.append(len(ids)) or decode(self, ids))
    pieces(tokenizer, [TOKENS.index(token) for token in ["ðŁ", "Ķ", "¥", "a"] * 100])
    assert max(longest) <= 6
