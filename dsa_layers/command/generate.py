"""`dsa generate` and `dsa chat`: continue prompts with a checkpoint, or chat with it."""

import argparse
import contextlib
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from dsa.runtime.checks import shown
from dsa_layers import SHIPPED_MODEL, Completion, Generator, SamplingParams, TokenEvent
from dsa_layers.cache.kv_cache import OutOfPages
from dsa_layers.command.model import join_ranks, load, place, read_files, start_ranks
from dsa_layers.command.parser import by_options, say, say_json
from dsa_layers.generation.engine_options import EngineOptions
from dsa_layers.generation.requests import check_stop_strings, encode_prompts
from dsa_layers.generation.sampling import sampling_defaults, with_seed
from dsa_layers.parallel.ranks import agreed

BEGIN_REASONING, END_REASONING = "<think>", "</think>"


def generate(args: argparse.Namespace) -> int:
    if not args.prompts:
        raise ValueError("--prompt: must be given, got none; accepted: --prompt TEXT, --prompt -, --prompt-file FILE")
    if args.logprobs is not None and not args.json:
        raise ValueError("--logprobs: needs --json, in whose events the log-probabilities are")
    params = sampling(args)
    exit_code = start_ranks(args)
    if exit_code is not None:
        return exit_code
    ranks = join_ranks(args)

    texts = read_prompts(args.prompts) if ranks is None else agreed(ranks, lambda: read_prompts(args.prompts))
    directory, config, tokenizer = read_files(args)
    check_stop_strings(params.stop, tokenizer)
    echoed, prompts = texts, texts
    if not args.raw and tokenizer.has_chat_template:
        prompts = [
            tokenizer.apply_chat_template([{"role": "user", "content": text}], **dict(args.chat_option))
            for text in texts
        ]
        echoed = [f"{text}\n\n" for text in texts]
    elif args.chat_option:
        raise ValueError("--chat-option: needs a checkpoint with a chat template or format, and no --raw")
    elif not args.raw and args.checkpoint != SHIPPED_MODEL:
        say("The checkpoint has no chat template and no known chat format: text is sent as it is.")
    encoded = encode_prompts(prompts, tokenizer, config.vocab_size)
    completions = [Completion(len(ids)) for ids in encoded for _ in range(params.n)]
    generator = Generator(
        load(args, directory, ranks),
        tokenizer,
        cache_tokens=args.cache_tokens,
        max_sequences=min(len(completions), EngineOptions.max_sequences),
        prefill_chunk=args.prefill_chunk,
        draft_tokens=args.draft,
        prefix_cache=args.prefix_cache,
        batch_invariant=args.batch_invariant,
    )
    try:
        events = events_of(generator, encoded, params)
        if args.json:
            start = {"checkpoint": str(directory), **place(args), "prompts": len(texts), **asdict(params)}
            say_json("start", **start)
        _print(events, completions, texts if args.json else echoed, args.json)
    except OutOfPages as error:
        raise ValueError(str(error)) from None
    if ranks is not None and ranks.rank > 0:
        return 0  # only rank 0 reports
    if args.json:
        say_json("throughput", **asdict(generator.throughput))
    else:
        how = f"temperature {params.temperature:g}, top-p {params.top_p:g}" if params.temperature else "greedy"
        weights = ", dequantised" if args.dequantize else ""
        say(f"{generator.throughput} ({args.device}, backend {place(args)['backend']}{weights}, {how})")
    errors = [completion.error for completion in completions if completion.error is not None]
    for error in errors:
        say(f"dsa generate: {error}")
    return 1 if errors else 0


def read_prompts(prompts: Iterable[str | Path]) -> list[str]:
    """Return the texts of prompts. A Path is a file to read, "-" is the standard input, and any other string is a text.
    Raise ValueError for a text that is empty or not UTF-8."""
    texts = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, Path):
            prompt = read_text(prompt, prompt.read_bytes())
        elif prompt == "-":
            prompt = read_text("--prompt -", sys.stdin.buffer.read())
        if not prompt:
            raise ValueError(f"prompts[{i}]: must not be empty, got no text")
        texts.append(prompt)
    return texts


def read_text(source: str | Path, content: bytes) -> str:
    """Decode `content` as UTF-8 and remove one newline at the end. Raise ValueError for invalid UTF-8; the message
    names `source`."""
    try:
        return re.sub(r"\r?\n\Z", "", content.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: must be UTF-8, got {shown(error.object[error.start : error.end])}") from None


def sampling(args: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters. Options override the checkpoint's generation_config.json."""
    names = SamplingParams.__dataclass_fields__
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    return SamplingParams(**sampling_defaults(args.checkpoint) | given)


def events_of(generator: Generator, prompts: list, params: SamplingParams) -> Iterator[TokenEvent]:
    """Yield the events of a generation. On a terminal, show a progress bar before the first event, if a prefill pass
    begins more than a second after the call."""
    with tqdm(desc="Prefill", unit=" tokens", leave=False, disable=None, delay=1) as bar:

        def on_prefill(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        with contextlib.closing(generator.stream(prompts, params, on_prefill=on_prefill)) as events:
            for event in events:
                bar.close()
                yield event


def _print(events: Iterator[TokenEvent], completions: list[Completion], prompts: list[str], as_json: bool) -> None:
    """Add the events to the completions, and print them.

    As JSON, print a "token" event for each token, and a "completion" event when a sequence ends. As text, print prompts
    and completions. Print a single sequence token by token. Print each of several sequences when it ends, with its
    number before each line: "[0] def f(x):".
    """
    alone, n = len(completions) == 1, len(completions) // len(prompts)
    for event in events:
        completion, prompt = completions[event.sequence], prompts[event.sequence // n]
        if alone and not as_json:
            print(event.text if completion.tokens else prompt + event.text, end="", flush=True)
        completion.add(event)
        if as_json:
            _print_event(event, completion, prompt)
        elif event.finish_reason is not None:
            lines = (prompt + completion.text).split("\n")
            print("\n" if alone else "".join(f"[{event.sequence}] {line}\n" for line in lines), end="", flush=True)


def _print_event(event: TokenEvent, completion: Completion, prompt: str) -> None:
    fields = {"sequence": event.sequence, "token": event.token, "text": event.text}
    if event.logprobs is not None:
        fields["logprobs"] = [{"token": token, **logprob._asdict()} for token, logprob in event.logprobs.items()]
    say_json("token", **fields)
    if event.finish_reason is not None:
        say_json(
            "completion",
            sequence=event.sequence,
            prompt=prompt,
            prompt_tokens=completion.prompt_tokens,
            text=completion.text,
            tokens=completion.tokens,
            finish_reason=completion.finish_reason,
            error=completion.error,
        )


def chat(args: argparse.Namespace) -> int:
    start_ranks(args)  # sets args.device and args.dequantize, and checks the GPU's memory; launches no ranks
    params = sampling(args)
    directory, _, tokenizer = read_files(args)
    check_stop_strings(params.stop, tokenizer)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    begin = len(messages)

    def prompt_after(question: dict[str, str]) -> str:
        return tokenizer.apply_chat_template([*messages, question], **dict(args.chat_option))

    prompt_after({"role": "user", "content": "Hello"})  # raises for a wrong --chat-option before the weights are loaded
    generator = Generator(
        load(args, directory),
        tokenizer,
        cache_tokens=args.cache_tokens,
        max_sequences=1,
        prefill_chunk=args.prefill_chunk,
        draft_tokens=args.draft,
        prefix_cache=True,
    )
    exit_code = replies = 0
    for line in _lines():
        if line == "/exit":
            break
        if line == "/reset":
            del messages[begin:]
            continue
        question = {"role": "user", "content": line}
        try:
            reply = _reply(generator, prompt_after(question), with_seed(params, replies))
        except (OutOfPages, ValueError) as error:
            problem = by_options(str(error).replace("prompts[0]", "the conversation"), args)
            say(f"dsa chat: {problem}; /reset forgets the conversation")
            exit_code = 1
            continue
        messages += [question, assistant_message(reply)]
        replies += 1
    return exit_code


def assistant_message(reply: str) -> dict[str, str]:
    """Return the assistant's message for a reply. If the reply begins with <think>, the text from there to </think>
    becomes `reasoning_content`."""
    begun = reply.lstrip()
    if not begun.startswith(BEGIN_REASONING):
        return {"role": "assistant", "content": reply}
    reasoning, _, answer = begun.removeprefix(BEGIN_REASONING).partition(END_REASONING)
    return {"role": "assistant", "content": answer, "reasoning_content": reasoning}


def _reply(generator: Generator, prompt: str, params: SamplingParams) -> str:
    """Generate and print a reply until it ends or the user presses Ctrl-C, and return it. Raise ValueError if the
    generation fails.

    If the prompt ends with <think> and the tokenizer decodes </think> as text, the reply begins with <think>, so that
    <think> and </think> enclose its reasoning.
    """
    tokenizer, reply = generator.tokenizer, ""
    shows_end = tokenizer.decode(tokenizer.encode(END_REASONING, add_bos=False)) == END_REASONING
    if shows_end and prompt.rstrip().endswith(BEGIN_REASONING):
        reply = BEGIN_REASONING
    print(reply, end="", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        for event in events_of(generator, [prompt], params):
            reply += event.text
            print(event.text, end="", flush=True)
            if event.error is not None:
                raise ValueError(event.error)
    print(flush=True)
    return reply


def _lines() -> Iterator[str]:
    """Yield the non-blank lines of the standard input, without surrounding whitespace."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # the import adds history and line editing to input()
        say("/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C ends a reply.")
    with contextlib.suppress(EOFError):
        while True:
            line = input("> " if is_terminal else "").strip()
            if line:
                yield line
