"""How far ahead of a sequence tokens can be drafted. Imports nothing: the command's help says it without torch."""

# Tokens of a sequence that a decoding pass may take in vain: what they overwrite is not needed without them. Kernels
# take as many beside the one that is none.
DRAFTS = 3
