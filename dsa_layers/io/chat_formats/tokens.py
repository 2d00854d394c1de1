"""Tokens that DeepSeek's formats write as text, which the tokenizer knows."""

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
LATEST_REMINDER = "<｜latest_reminder｜>"
THINK, END_THINK = "<think>", "</think>"
DSML = "｜DSML｜"

# Tokens that every format needs: a tokenizer without them is not made for conversations.
NEEDED = (USER, ASSISTANT, BOS, EOS)
