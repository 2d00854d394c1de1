"""Ids decoded one by one give the text of all ids, whatever the tokenizer's decoder does."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models

from dsa_layers.generation.tokenizer import Tokenizer

TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
TOKENS += ["a", "▁", "▁a", "▁▁ b", " ", "  ", "##b", ".", "n't", "Ġa", "ðŁ", "Ķ", "¥", "â", "\ufffd", "é", "<0x+5>", ""]
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
ID = st.sampled_from([*range(256, 256 + 18)]) | st.sampled_from([0xF0, 0x9F, 0x94, 0xA5, 0xE2, 0x80, 0x41, 900])


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
@given(ids=st.lists(ID | st.just(len(TOKENS)), max_size=20))
def test_joined_pieces_are_the_decoded_text(tokenizer, ids):
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_text_is_returned_once_it_is_final(tmp_path):
    stripped = make(tmp_path, decoders.Sequence([*BYTE_FALLBACK, decoders.Strip(" ", 1, 1)]))
    ids = [TOKENS.index("▁a"), *"🔥".encode(), TOKENS.index(" "), 0x41, 0xFF, TOKENS.index("a"), TOKENS.index("▁")]
    assert pieces(stripped, ids) == ["a", "", "", "", "", "🔥", "", "", " \ufffd\ufffda", "", ""]
    assert stripped.decode(ids) == "a🔥 \ufffd\ufffda"


@pytest.mark.parametrize("tokens", [["ðŁ"], ["a"], ["▁"], ["<0x80>"]])
@pytest.mark.parametrize("decoder", ["byte level", "byte fallback"])
def test_the_work_per_token_does_not_grow(tmp_path, decoder, tokens, monkeypatch):
    tokenizer = make(tmp_path, DECODERS[decoder])
    ids = [TOKENS.index(token) for token in tokens] * 3000
    expected = tokenizer.decode(ids)
    monkeypatch.setattr(Tokenizer, "decode", None)  # of the whole text, or of its end
    assert "".join(pieces(tokenizer, ids)) == expected
