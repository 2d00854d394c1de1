"""Completions and the lines that show them, of very many tokens."""

import io
import time

from dsa_layers.command.completion_output import NumberedLines
from dsa_layers.generation.results import Completion, TokenEvent


def test_a_long_text_takes_time_in_proportion():
    """A line of two million characters, in pieces of twenty: not copied with each."""
    events = [TokenEvent(1, i, "x" * 20, None) for i in range(100_000)]
    events.append(TokenEvent(1, 5, "\n\nend", "length"))
    completion, stream = Completion(3), io.StringIO()
    output = NumberedLines(stream)
    before = time.process_time()
    output.prompt(1, "a\nb")
    for event in events:
        completion.add(event)
        output.event(event)
    output.completion(1, "a\nb", completion)
    output.close()
    assert time.process_time() - before < 2
    text = "x" * 2_000_000 + "\n\nend"
    assert completion.text == text and len(completion.tokens) == len(events)
    assert stream.getvalue() == f"[1] a\n[1] b{text[:-5]}\n[1] \n[1] end\n"
