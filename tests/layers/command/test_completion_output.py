"""Completions and the lines that show them, of very many tokens."""

import io
import time
from unittest.mock import Mock

from dsa_layers.command import prefill_progress
from dsa_layers.command.completion_output import NumberedLines
from dsa_layers.command.prefill_progress import PrefillProgress
from dsa_layers.generation.results import Completion, TokenEvent


def seconds(pieces):
    """Of a line of so many pieces of twenty characters."""
    events = [TokenEvent(1, i, "x" * 20, None) for i in range(pieces)]
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
    taken = time.process_time() - before
    line = "x" * 20 * pieces
    assert completion.text == f"{line}\n\nend" and len(completion.tokens) == len(events)
    assert stream.getvalue() == f"[1] a\n[1] b{line}\n[1] \n[1] end\n"
    return taken


def test_a_long_text_takes_time_in_proportion():
    """It is not copied with each piece: a line of two million characters would take a hundred times as long as a tenth
    of it."""
    assert seconds(100_000) < 40 * seconds(10_000)


def test_the_progress_of_prompts_is_shown_where_they_need_several_passes(monkeypatch):
    monkeypatch.setattr(prefill_progress, "tqdm", bar := Mock(side_effect=lambda **_: Mock(n=0)))
    PrefillProgress(4)(0, 4)
    assert not bar.called
    progress = PrefillProgress(4)
    progress(0, 9)
    progress(4, 9)
    assert bar.call_args.kwargs["total"] == 9 and bar.call_count == 1
    assert progress.first(iter([1, 2])) == [1]
