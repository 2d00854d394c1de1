"""`dsa chat`: a conversation with a checkpoint."""

import argparse
import contextlib
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from dsa_layers import SHIPPED_MODEL, options
from dsa_layers.command import on_gpus
from dsa_layers.command.chat_options import add_chat_option, chat_prompt, has_chat_template
from dsa_layers.command.conversation import Conversation
from dsa_layers.command.model_options import (
    add_draft_option,
    add_model_options,
    load,
    read_files,
    say_that_drafts_exist,
)
from dsa_layers.command.reply import END_REASONING, Reply
from dsa_layers.command.reply_output import ReplyOutput
from dsa_layers.command.sampling_options import (
    add_cache_option,
    add_sampling_options,
    by_options,
    check_stop,
    sampling,
)
from dsa_layers.command.streams import on_interrupt, say
from dsa_layers.parallel.environment import started_ranks

if TYPE_CHECKING:
    from dsa_layers.generation.generator import Generator
    from dsa_layers.generation.sampling import SamplingParams

_COMMANDS = """\
/reset        forget the conversation
/system TEXT  set the system message, without TEXT remove it
/help         list these commands
/exit         end, as does Ctrl-D
Ctrl-C        end a reply; twice at an empty prompt: end"""
_EPILOG = f"""\
Each line of the standard input is a message, or one of these:
{_COMMANDS}
Where the standard output is no terminal, reasoning is printed between <think> and </think>.
Exit codes: 0; 1 where a reply failed; 2 for a wrong call or input; 130 after Ctrl-C."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("chat", help="talk with a checkpoint on the terminal", epilog=_EPILOG)
    parser.set_defaults(run=run)
    add_model_options(parser)
    parser.add_argument("--gpus", type=options.positive, help=argparse.SUPPRESS)  # refused with its reason
    parser.add_argument("--system", default="", metavar="TEXT", help="the system message (default: none)")
    add_chat_option(parser)
    add_sampling_options(parser, max_tokens=4096, each="reply")
    add_cache_option(parser, "on a GPU what its memory has room for; on a CPU 65536, or the model's longer context")
    add_draft_option(
        parser, "draft so many tokens ahead by the checkpoint's multi-token-prediction layer, as `dsa generate` does"
    )


def run(args: argparse.Namespace) -> int:
    from dsa_layers.generation.generator import Generator

    ranks = max(args.gpus or 1, started_ranks() or 1)
    if ranks > 1:
        raise ValueError(
            f"--gpus: must be 1 for dsa chat, got {ranks}: Ctrl-C would end a reply on each GPU at another token; "
            "dsa generate takes several"
        )
    if sys.stdin is None:
        raise ValueError("standard input: must be open, got a closed one")
    system = options.text("--system", args.system)
    on_gpus.check_memory(args, None)
    params = sampling(args)
    files = read_files(args)
    tokenizer = files.tokenizer
    check_stop(params, tokenizer)
    templated = has_chat_template(args, tokenizer)
    conversation = Conversation(
        (lambda messages: chat_prompt(args, tokenizer, messages)) if templated else None, system
    )
    conversation.prompt("Hello")  # a wrong --chat-option ends the program here, and not each reply
    if args.checkpoint == SHIPPED_MODEL:
        say("This model continues Python source and does not chat.")
    with on_gpus.errors_of_options():
        loaded = load(args, files, drafter=args.draft > 0)
    say_that_drafts_exist(args, files.config)
    sizes = {"cache_tokens": args.cache_tokens, "prefill_chunk": args.prefill_chunk, "draft_tokens": args.draft}
    try:
        generator = Generator(loaded.model, tokenizer, prefix_cache=True, **sizes)
    except ValueError as error:
        raise ValueError(by_options(str(error))) from None
    return _Chat(conversation, generator, params).run()


class _Chat:
    """Reads messages and shows the replies to them."""

    def __init__(self, conversation: Conversation, generator: "Generator", params: "SamplingParams") -> None:
        self._conversation, self._generator, self._params = conversation, generator, params
        tokenizer = generator.tokenizer
        self._marks = tokenizer.decode(tokenizer.encode(END_REASONING, add_bos=False)) == END_REASONING
        self._failed = False

    def run(self) -> int:
        """The exit code. Raises KeyboardInterrupt for the second Ctrl-C at a prompt."""
        for line in _lines():
            command, *rest = re.split(r"\s+", line.rstrip(), maxsplit=1)
            if command == "/exit":
                break
            elif command == "/help":
                say(_COMMANDS)
            elif command == "/reset":
                self._conversation.messages.clear()
            elif command == "/system":
                self._conversation.system = "".join(rest).strip()
            elif command.startswith("/") and not rest:
                say(f"{command}: is no command; /help lists them")
            else:
                self._reply_to(line)
        return int(self._failed)

    def _reply_to(self, text: str) -> None:
        from dsa_layers.cache.kv_cache import OutOfPages

        try:
            reply = self._reply(self._conversation.prompt(text))
        except (OutOfPages, ValueError) as error:
            problem = re.sub(r"^prompts\[0\](.*)", r"the conversation\1; /reset forgets it", by_options(str(error)))
            say(f"dsa chat: {problem}")
            self._failed = True
            return
        if reply.answer or reply.reasoning:
            self._conversation.add(text, reply)
        if self._params.seed is not None:
            self._params = replace(self._params, seed=(self._params.seed + 1) % 2**63)

    def _reply(self, prompt: str) -> Reply:
        """What is written until the reply ends, or until Ctrl-C. Raises ValueError for logits that are not finite."""
        from dsa_layers.command.prefill_progress import PrefillProgress

        reply = Reply(prompt, marks=self._marks)
        progress = PrefillProgress.of(self._generator)
        told = {} if progress is None else {"on_prefill": progress}
        events = self._generator.stream([prompt], self._params, **told)
        with (
            _interrupts() as interrupts,
            contextlib.closing(events),
            contextlib.closing(ReplyOutput(sys.stdout)) as output,
        ):
            with contextlib.suppress(KeyboardInterrupt):
                begun = [] if progress is None else progress.first(events)
                for event in chain(begun, events):
                    output.show(reply.push(event.text))
                    if event.error is not None:
                        raise ValueError(event.error)
                    if interrupts:
                        break
            output.show(reply.push("", last=True))
        return reply


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collects the first Ctrl-C, so that a pass is not cut in two. The second is raised: a prompt may take a while."""
    seen: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        seen.append(number)
        if len(seen) > 1:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    on_interrupt(interrupt)
    try:
        yield seen
    finally:
        on_interrupt(before)


def _lines() -> Iterator[str]:
    """The lines of the standard input that are not blank. Raises KeyboardInterrupt for the second Ctrl-C in a row, and
    ValueError for a line that is not UTF-8, which on a terminal is told and dropped."""
    asks = sys.stdin.isatty() and sys.stdout.isatty()
    if asks:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # input() then has a history and an editor
        say("/help lists the commands.")
    interrupted = False
    while True:
        try:
            line = _line(asks)
        except KeyboardInterrupt:
            if interrupted:
                raise
            say("\nCtrl-C again ends the conversation.")
            interrupted = True
            continue
        except ValueError as error:
            if not sys.stdin.isatty():
                raise
            say(f"dsa chat: {error}")
            continue
        interrupted = False
        if not line:
            break
        if line.strip():
            yield line.strip()
    if asks:
        say("")


def _line(asks: bool) -> str:
    """The next line with its end, "" after the last."""
    try:
        line = f"{input('> ')}\n" if asks else sys.stdin.readline()
    except EOFError:
        return ""
    except UnicodeDecodeError as error:
        raise options.not_utf8("standard input", error) from None
    return options.text("standard input", line)
