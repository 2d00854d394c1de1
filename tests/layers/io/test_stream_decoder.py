"""Ids decoded one by one give the text of all ids, whatever the tokenizer's decoder does."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, pre_tokenizers

from dsa_layers.io.tokenizer import Tokenizer

FALLBACKS = [f"<0x{byte:02X}>" for byte in range(256)]
PARTS = ["a", "▁", "▁a", "▁▁ b", "  ", "##b", ".", "n't", "Ġa", "ðŁ", "Ķ", "¥", "â", "Ĥ", "ï¿½", "\ufffd", "<0x+5>", ""]
TOKENS = list(dict.fromkeys([*FALLBACKS, *PARTS, " ", *sorted(pre_tokenizers.ByteLevel.alphabet())]))
BYTE_FALLBACK = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "none": None,
    "byte level": decoders.ByteLevel(),
    "byte level, stripped": decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
    "byte fallback": decoders.Sequence([*BYTE_FALLBACK, decoders.Strip(" ", 1, 0)]),
    "byte fallback, not fused": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "byte fallback, nested": decoders.Sequence([decoders.Sequence(BYTE_FALLBACK), decoders.Strip(" ", 2, 0)]),
    "Metaspace": decoders.Metaspace(),
    "Metaspace, never prepended": decoders.Metaspace(prepend_scheme="never"),
    "WordPiece": decoders.WordPiece(),
    "each token stripped": decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
    "BPE": decoders.BPEDecoder(suffix="a"),
    "CTC": decoders.CTC(pad_token="a", word_delimiter_token="."),
    "replaced when fused": decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("a +"), "c")]),
}
# Half of them parts that make words and characters together; one special token, and one that there is not.
ID = st.sampled_from([*map(TOKENS.index, PARTS), *"🔥€".encode()]) | st.integers(0, len(TOKENS) + 1)


@pytest.fixture(scope="module", params=DECODERS)
def tokenizer(request, tmp_path_factory):
    return make(tmp_path_factory.mktemp("tokenizer"), DECODERS[request.param])


def make(directory, decoder):
    tokenizer = tokenizers.Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="a"))
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


def test_text_is_returned_once_it_is_final(tmp_path):
    byte_level = make(tmp_path, decoders.ByteLevel())
    ids = [TOKENS.index(token) for token in ["ðŁ", "Ķ", "¥", "a", "ï¿½", "â", "a", "â"]]
    assert pieces(byte_level, ids) == ["", "", "🔥", "a", "\ufffd", "", "\ufffda", "", "\ufffd"]
    stripped = make(tmp_path, decoders.Sequence([*BYTE_FALLBACK, decoders.Strip(" ", 1, 1)]))
    ids = [TOKENS.index("▁a"), *"🔥".encode(), TOKENS.index(" "), 0x41, 0xFF, TOKENS.index("a"), TOKENS.index("▁")]
    assert pieces(stripped, ids) == ["a", "", "", "", "", "🔥", "", "", " \ufffd\ufffda", "", ""]


@pytest.mark.parametrize("token", ["ðŁ", "a", "▁", "<0x80>"])
@pytest.mark.parametrize("decoder", ["byte level", "byte fallback"])
def test_the_work_per_token_does_not_grow(tmp_path, decoder, token, monkeypatch):
    tokenizer, ids = make(tmp_path, DECODERS[decoder]), [TOKENS.index(token)] * 3000
    expected = tokenizer.decode(ids)
    monkeypatch.setattr(Tokenizer, "decode", None)  # of the whole text, or of its end
    assert "".join(pieces(tokenizer, ids)) == expected
