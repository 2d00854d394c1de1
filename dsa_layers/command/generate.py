"""`dsa generate`: continue prompts with a checkpoint."""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from dsa_layers import SHIPPED_MODEL, Completion, Generator, SamplingParams, TokenEvent, Tokenizer
from dsa_layers.arguments import shown
from dsa_layers.cache.kv_cache import OutOfPages
from dsa_layers.command.messages import by_options, say, say_json
from dsa_layers.command.model import join_ranks, load, read_files, start_ranks
from dsa_layers.command.parser import DEFAULT_CACHE, PromptSource
from dsa_layers.evaluation.keys_read import KeysRead
from dsa_layers.generation.requests import check_stop_strings, encode_prompts
from dsa_layers.generation.sampling import sampling_defaults
from dsa_layers.models.precision import check_device
from dsa_layers.parallel.process_group import agreed

# Styles of text on a terminal.
BOLD, DIM = 1, 2


def run(args: argparse.Namespace) -> int:
    if not args.prompts:
        raise ValueError("--prompt: must be given, got none; accepted: --prompt TEXT, --prompt -, --prompt-file FILE")
    if args.raw and args.chat_option:
        raise ValueError("--chat-option: must not be given with --raw, which sends prompts as they are")
    if args.logprobs is not None and not args.json:
        raise ValueError("--logprobs: needs --json, in whose events the log-probabilities are")
    if args.batch_invariant and (
        args.dequantize or args.prefix_cache or check_device(args.device).type != "cuda"
    ):  # `Generator` refuses the same, but after the weights are loaded
        raise ValueError("--batch-invariant: takes a GPU and FP8 weights, without --dequantize and --prefix-cache")
    params = sampling(args)
    exit_code = start_ranks(args)
    if exit_code is not None:
        return exit_code
    ranks = join_ranks(args)

    texts = read_prompts(args.prompts) if ranks is None else agreed(ranks, lambda: read_prompts(args.prompts))
    files = read_files(args)
    check_stop_strings(params.stop, files.tokenizer)
    echoed, prompts = texts, texts
    if not args.raw and has_chat_format(args, files.tokenizer):
        prompts = [
            files.tokenizer.apply_chat_template([{"role": "user", "content": text}], **dict(args.chat_option))
            for text in texts
        ]
        echoed = [f"{text}\n\n" for text in texts]
    encoded = encode_prompts(prompts, files.tokenizer, files.config.vocab_size)
    loaded = load(args, files, ranks)
    cache_tokens = args.cache_tokens
    needed = args.n * sum(len(ids) + args.max_tokens + loaded.model.page_size for ids in encoded)
    if cache_tokens is None and needed <= DEFAULT_CACHE:
        cache_tokens = DEFAULT_CACHE  # leaves memory to other processes

    with KeysRead(loaded.model) if args.stats else contextlib.nullcontext() as keys:
        generator = Generator(
            loaded.model,
            files.tokenizer,
            cache_tokens=cache_tokens,
            prefill_chunk=args.prefill_chunk,
            draft_tokens=args.draft,
            prefix_cache=args.prefix_cache,
            batch_invariant=args.batch_invariant,
            cuda_graphs=not args.stats,
        )
        try:
            events = events_of(generator, encoded, params)
            if args.json:
                say_json(
                    "start",
                    checkpoint=str(files.directory),
                    device=loaded.device,
                    backend=loaded.backend,
                    dequantized=loaded.dequantized,
                    prompts=len(texts),
                    **asdict(params),
                )
                errors = _print_events(events, texts, encoded, params.n)
            else:
                errors = _print_texts(events, echoed, params.n)
        except OutOfPages as error:
            raise ValueError(str(error)) from None
    if ranks is not None and ranks.rank > 0:
        return 0  # the first rank reports
    counts = keys.counts() if args.stats else None
    if args.json:
        say_json("throughput", **asdict(generator.throughput))
        if counts is not None:
            say_json("keys_read", **asdict(counts), share=counts.share)
    else:
        if counts is not None:
            say(
                f"keys read: {counts.read:.1f} a token of the {counts.dense:.1f} that dense attention reads "
                f"({counts.share:.0%}), at most {counts.most_read} of {counts.most_dense}; context: "
                f"{counts.context:.1f} tokens, at most {counts.longest_context}"
            )
        how = f"temperature {params.temperature:g}, top-p {params.top_p:g}" if params.temperature else "greedy"
        weights = ", dequantised" if loaded.dequantized else ""
        say(f"{generator.throughput} ({loaded.device}, backend {loaded.backend}{weights}, {how})")
    for error in errors:
        say(f"dsa generate: {by_options(error, args)}")
    return 1 if errors else 0


def read_prompts(sources: list[PromptSource]) -> list[str]:
    """Raise ValueError, which names the option, for a prompt that cannot be read."""
    texts = []
    for i, source in enumerate(sources):
        name, text = source.name(i, len(sources)), source.value
        if source.option == "--prompt-file":
            try:
                text = read_text(name, Path(text).read_bytes())
            except OSError as error:
                raise ValueError(f"{name}: {error.strerror}") from None
        elif text == "-":
            text = read_text(name, sys.stdin.buffer.read())
        if not text:
            raise ValueError(f"{name}: must not be empty, got no text")
        texts.append(text)
    return texts


def _print_texts(events: Iterator[TokenEvent], prompts: list[str], n: int) -> list[str]:
    """Print each prompt and the text that follows it. Return the errors of sequences that failed.

    One sequence is printed token by token. Several take turns by whole lines, each with the number of its sequence:
    "[0] def f(x):".
    """
    numbered = len(prompts) * n > 1
    unfinished: dict[int, str] = {}  # the last line of each sequence that has begun
    errors = []

    def add(sequence: int, text: str) -> None:
        if numbered:
            *lines, unfinished[sequence] = (unfinished[sequence] + text).split("\n")
            text = "".join(f"[{sequence}] {line}\n" for line in lines)
        print(text, end="", flush=True)

    try:
        for event in events:
            if event.sequence not in unfinished:
                unfinished[event.sequence] = ""
                add(event.sequence, styled(prompts[event.sequence // n], BOLD))
            add(event.sequence, event.text)
            if event.error is not None:
                errors.append(event.error)
            if event.finish_reason is not None and unfinished[event.sequence]:
                add(event.sequence, "\n")
    finally:
        for sequence, line in unfinished.items():
            if line or not numbered:
                add(sequence, "\n")
    return errors


def _print_events(events: Iterator[TokenEvent], prompts: list[str], encoded: list[list[int]], n: int) -> list[str]:
    """Print an event "token" for each token and "completion" for each sequence that has ended. Return the errors."""
    completions = [Completion(len(ids)) for ids in encoded for _ in range(n)]
    for event in events:
        completion = completions[event.sequence]
        completion.add(event)
        fields = {"sequence": event.sequence, "token": event.token, "text": event.text}
        if event.logprobs is not None:
            fields["logprobs"] = [{"token": token, **logprob._asdict()} for token, logprob in event.logprobs.items()]
        say_json("token", **fields)
        if event.finish_reason is not None:
            say_json(
                "completion",
                sequence=event.sequence,
                prompt=prompts[event.sequence // n],
                prompt_tokens=completion.prompt_tokens,
                text=completion.text,
                tokens=completion.tokens,
                finish_reason=completion.finish_reason,
                error=completion.error,
            )
    return [completion.error for completion in completions if completion.error is not None]


def read_text(source: str, content: bytes) -> str:
    """Return UTF-8 text without a newline at its end. Raise ValueError, which names the source, for other bytes."""
    try:
        return re.sub(r"\r?\n\Z", "", content.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: must be UTF-8, got {shown(error.object[error.start : error.end])}") from None


def sampling(args: argparse.Namespace) -> SamplingParams:
    """Options override what the checkpoint's generation_config.json says."""
    names = SamplingParams.__dataclass_fields__
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    return SamplingParams(**sampling_defaults(args.checkpoint) | given)


def has_chat_format(args: argparse.Namespace, tokenizer: Tokenizer) -> bool:
    """Return whether messages become prompts by a template or a format. Say so if they do not, except for the shipped
    model, which continues source code."""
    if not tokenizer.has_chat_template:
        if args.chat_option:
            raise ValueError("--chat-option: must not be given for a checkpoint without a chat template or format")
        if args.checkpoint != SHIPPED_MODEL:
            say("The checkpoint has no chat template and no known chat format: text is sent as it is.")
    return tokenizer.has_chat_template


def events_of(
    generator: Generator, prompts: list, params: SamplingParams, interrupts: Sequence = ()
) -> Iterator[TokenEvent]:
    """Yield the events of a generation. On a terminal, prompts that need several passes have a progress bar, which is
    removed before the first event. If `interrupts` is not empty, KeyboardInterrupt is raised before the next pass over
    prompts."""
    bar = None

    def on_prefill(done: int, total: int) -> None:
        nonlocal bar
        if interrupts:
            raise KeyboardInterrupt
        if bar is None and total - done > generator.prefill_chunk:
            bar = tqdm(desc="Prefill", total=total, unit=" tokens", leave=False, disable=None)
        if bar is not None:
            bar.update(done - bar.n)

    with contextlib.closing(generator.stream(prompts, params, on_prefill=on_prefill)) as events:
        for event in events:
            if bar is not None:
                bar.close()
            yield event


def styled(text: str, style: int) -> str:
    """Return the text as a terminal shows it in a style, which ends with each line; elsewhere the text itself."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb" or os.environ.get("NO_COLOR"):
        return text
    return "\n".join(f"\x1b[{style}m{line}\x1b[0m" if line else line for line in text.split("\n"))
