"""`dsa chat`: a conversation with a checkpoint."""

import argparse
import contextlib
import re
import signal
import sys
from collections.abc import Iterator

from dsa_layers import SHIPPED_MODEL, Generator, SamplingParams
from dsa_layers.cache.kv_cache import OutOfPages
from dsa_layers.command.generate import DIM, events_of, has_chat_format, sampling, styled
from dsa_layers.command.messages import by_options, say
from dsa_layers.command.model import load, read_files, start_ranks
from dsa_layers.command.parser import CHAT_COMMANDS
from dsa_layers.generation.requests import check_stop_strings
from dsa_layers.generation.sampling import with_seed

BEGIN_REASONING, END_REASONING = "<think>", "</think>"


def run(args: argparse.Namespace) -> int:
    start_ranks(args)  # checks the memory; there is only one GPU
    params = sampling(args)
    files = read_files(args)
    check_stop_strings(params.stop, files.tokenizer)
    has_format = has_chat_format(args, files.tokenizer)
    system, messages = args.system, []

    def prompt_after(*following: dict[str, str]) -> str:
        """Return the prompt for the messages and those that follow. Without a chat format it is their texts, with a
        line break after each."""
        begin = [{"role": "system", "content": system}] if system else []
        every = [*begin, *messages, *following]
        if has_format:
            return files.tokenizer.apply_chat_template(every, **dict(args.chat_option))
        return "".join(f"{message['content']}\n" for message in every)

    prompt_after({"role": "user", "content": "Hello"})  # a wrong --chat-option ends the program here
    if args.checkpoint == SHIPPED_MODEL:
        say("This model continues Python source and does not chat.")
    generator = Generator(
        load(args, files).model,
        files.tokenizer,
        cache_tokens=args.cache_tokens,
        prefill_chunk=args.prefill_chunk,
        draft_tokens=args.draft,
        prefix_cache=True,
    )
    exit_code = replies = 0
    for line in _lines():
        command, *rest = re.split(r"\s+", line, maxsplit=1)
        if command == "/exit":
            break
        elif command == "/help":
            say(CHAT_COMMANDS)
        elif command == "/reset":
            messages.clear()
        elif command == "/system":
            system = "".join(rest)
        elif command.startswith("/") and not rest:
            say(f"{command}: is no command; /help lists them")
        else:
            question = {"role": "user", "content": line}
            try:
                reply = _reply(generator, prompt_after(question), with_seed(params, replies))
            except (OutOfPages, ValueError) as error:
                problem = re.sub(
                    r"^prompts\[0\](.*)", r"the conversation\1; /reset forgets it", by_options(str(error), args)
                )
                say(f"dsa chat: {problem}")
                exit_code = 1
                continue
            messages += [question, assistant_message(reply)]
            replies += 1
    return exit_code


def assistant_message(reply: str) -> dict[str, str]:
    """Return the message of a reply. Reasoning is what stands between marks before the answer."""
    begun = reply.lstrip()
    if not begun.startswith(BEGIN_REASONING):
        return {"role": "assistant", "content": reply}
    reasoning, _, answer = begun.removeprefix(BEGIN_REASONING).partition(END_REASONING)
    return {"role": "assistant", "content": answer, "reasoning_content": reasoning}


def _reply(generator: Generator, prompt: str, params: SamplingParams) -> str:
    """Print the reply until it ends, or until Ctrl-C, and return it. Raise ValueError for logits that are not finite.
    A reply whose reasoning the prompt has begun starts with the mark, if the tokenizer shows the mark of its end."""
    tokenizer, reply = generator.tokenizer, ""
    shows_end = tokenizer.decode(tokenizer.encode(END_REASONING, add_bos=False)) == END_REASONING
    if shows_end and prompt.rstrip().endswith(BEGIN_REASONING):
        reply = BEGIN_REASONING
    print(styled(reply, DIM), end="", flush=True)
    interrupts: list[int] = []  # Ctrl-C ends the reply after a pass, not in the middle of one
    before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        for event in events_of(generator, [prompt], params, interrupts):
            reply += event.text
            reasons = reply.lstrip().startswith(BEGIN_REASONING) and END_REASONING not in reply
            print(styled(event.text, DIM) if reasons else event.text, end="", flush=True)
            if event.error is not None:
                raise ValueError(event.error)
            if interrupts:
                break
    except KeyboardInterrupt:  # before the first token
        pass
    finally:
        signal.signal(signal.SIGINT, before)
    print(flush=True)
    return reply


def _lines() -> Iterator[str]:
    """Yield the lines of the standard input that are not blank. Raise KeyboardInterrupt for the second Ctrl-C in a
    row."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() a history and an editor
        say("/help lists the commands.")
    interrupted = False
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            break
        except KeyboardInterrupt:
            if interrupted:
                raise
            say("\nCtrl-C again ends the conversation.")
            interrupted = True
            continue
        interrupted = False
        if line:
            yield line
    if is_terminal:
        say("")
