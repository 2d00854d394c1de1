"""A model's reply as it comes, taken apart into reasoning and answer."""

BEGIN_REASONING, END_REASONING = "<think>", "</think>"


class Reply:
    """Text that may begin with reasoning between marks. A mark may come in pieces: text that may be the beginning of
    one is held back.

    prompt  which the reply follows; one that ends in the first mark has begun the reasoning
    marks   False: the tokenizer shows no marks, so that all text is the answer
    """

    def __init__(self, prompt: str, *, marks: bool = True) -> None:
        self.reasoning = self.answer = ""
        self._marks = marks
        self._reasons = marks and prompt.rstrip().endswith(BEGIN_REASONING)
        self._held = ""

    def push(self, text: str, *, last: bool = False) -> list[tuple[bool, str]]:
        """Pieces to show, each (whether it is reasoning, text). last: no text follows."""
        self._held += text
        pieces = []
        while (mark := self._next_mark()) and mark in self._held:
            before, _, self._held = self._held.partition(mark)
            pieces.append(self._take(before))
            self._reasons = not self._reasons
        sure = len(self._held) - (0 if last else _beginning_of(mark, self._held))
        pieces.append(self._take(self._held[:sure]))
        self._held = self._held[sure:]
        return [piece for piece in pieces if piece[1]]

    def _next_mark(self) -> str:
        """The mark that may come next, "" for none: reasoning begins before the answer or not at all."""
        if self._reasons:
            return END_REASONING
        begun = (self.answer + self._held).lstrip()
        may_begin = begun.startswith(BEGIN_REASONING) or BEGIN_REASONING.startswith(begun)
        return BEGIN_REASONING if self._marks and may_begin and not self.reasoning else ""

    def _take(self, text: str) -> tuple[bool, str]:
        if self._reasons:
            self.reasoning += text
        else:
            self.answer += text
        return self._reasons, text


def _beginning_of(mark: str, text: str) -> int:
    """The length of the longest end of `text` that begins `mark` and is not all of it."""
    return max((n for n in range(len(mark)) if text.endswith(mark[:n])), default=0)
