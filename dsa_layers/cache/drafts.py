"""The maximum number of draft tokens. This module imports nothing, so that the command's help loads without torch."""

# Maximum number of draft tokens per sequence in a decoding pass. Window rings and compressor states have DRAFTS extra
# rows, so that a rejected draft overwrites nothing that the sequence still needs. The kernel of
# `dsa.fp8_paged_mqa_logits` accepts up to DRAFTS + 1 tokens per sequence: the last token of the text, and its drafts.
DRAFTS = 3
