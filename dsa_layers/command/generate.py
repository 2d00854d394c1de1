"""`dsa generate`: continue prompts with a checkpoint."""

import argparse
import contextlib
import re
import sys
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING

from dsa_layers import options
from dsa_layers.cache.drafts import DRAFTS
from dsa_layers.command import on_gpus
from dsa_layers.command.chat_options import add_chat_option, chat_prompt, has_chat_template
from dsa_layers.command.model_options import (
    LoadedModel,
    add_draft_option,
    add_model_options,
    chosen_device,
    load,
    read_files,
    say_that_drafts_exist,
)
from dsa_layers.command.prompt_sources import Prompt, add_prompt_options, read_prompts
from dsa_layers.command.sampling_options import (
    add_cache_option,
    add_sampling_options,
    by_options,
    check_stop,
    sampling,
)
from dsa_layers.command.streams import say, say_json

if TYPE_CHECKING:
    from dsa_layers.evaluation.keys_read import KeyCounts
    from dsa_layers.generation.results import Completion, Throughput
    from dsa_layers.generation.sampling import SamplingParams

_FEW = 65536  # tokens of the cache, if the prompts need no more

_JSON = """\
With --json the standard output is one JSON object a line, each with the key "event":
  start       checkpoint, device, backend, dequantized, prompts, max_tokens, temperature, top_k, top_p, seed, stop, n,
              min_p, repetition_penalty, presence_penalty, frequency_penalty, logprobs
  token       sequence (its number, from 0: n of each prompt one after another), token (its id), text (what can be shown
              by now); with --logprobs also logprobs, a list of token, logprob, rank: the token's, then the likeliest
  completion  sequence, prompt, prompt_tokens, text, tokens, finish_reason ("eos", "stop", "length" or "error"), error
  throughput  prefill_tokens, prefill_seconds, decode_tokens, decode_seconds, drafted, taken (drafts that were right),
              reused_tokens (of prompts, with --prefix-cache)
  keys_read   read, dense (what dense attention over the same cache reads), context, share (read / dense), most_read,
              most_dense, longest_context (with --stats)
  error       error, exit_code: nothing follows, but with --gpus perhaps another one, of the rank that is the cause
Exit codes: 0; 1 where a sequence or the command failed; 2 for a wrong call or input; 130 after Ctrl-C."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("generate", help="continue prompts with a checkpoint", epilog=_JSON)
    parser.set_defaults(run=run)
    add_model_options(parser)
    on_gpus.add_gpus_option(parser)
    add_prompt_options(parser)
    parser.add_argument(
        "--raw",
        action="store_true",
        help="send prompts as they are (default: off; as messages, by the chat template or format if there is one)",
    )
    add_chat_option(parser)
    add_sampling_options(parser, max_tokens=256, each="sequence")
    add_cache_option(parser, f"{_FEW}; where prompts need more, on a GPU what its memory has room for")
    parser.add_argument(
        "--prefix-cache",
        action="store_true",
        help="prompts that begin with the same tokens share the full pages of these, which are computed once; what is "
        "generated is the same, but for what rounding decides (default: off)",
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="on GPUs, with FP8 weights, FP8 indexers and bfloat16: the tokens of a prompt, sampled ones with --seed, "
        "depend on no other prompt and not on drafts, bit for bit, which is slower (default: off)",
    )
    add_draft_option(
        parser,
        f"draft up to {DRAFTS} tokens ahead by the checkpoint's multi-token-prediction layer, so that a pass may give "
        "several",
    )
    parser.add_argument(
        "--stats",
        action="store_true",
        help="count the keys that tokens read, those of drafts that are not taken and of the drafter's layer among "
        "them; on a GPU without CUDA graphs, which is slower (default: off)",
    )
    parser.add_argument("--n", type=options.positive, default=1, help="sequences of each prompt (default: %(default)s)")
    parser.add_argument(
        "--logprobs",
        type=options.not_negative,
        metavar="K",
        help="with --json: log-probabilities of each token and of the K likeliest ones (default: none)",
    )
    parser.add_argument("--json", action="store_true", help="print events in JSON, see below (default: off)")


def run(args: argparse.Namespace) -> int:
    from dsa_layers.cache.kv_cache import OutOfPages
    from dsa_layers.command.prefill_progress import PrefillProgress
    from dsa_layers.evaluation.keys_read import KeysRead
    from dsa_layers.generation.generator import Generator
    from dsa_layers.generation.prompts import encode_prompts

    if args.raw and args.chat_option:
        raise ValueError("--chat-option: must not be given with --raw, which sends prompts as they are")
    if args.logprobs is not None and not args.json:
        raise ValueError("--logprobs: needs --json, in whose events the log-probabilities are")
    starts_ranks = on_gpus.starts_ranks(args)
    if args.batch_invariant:
        _check_invariant(args)
    if starts_ranks:
        return on_gpus.start_ranks(args)
    ranks = on_gpus.join_ranks(args)
    on_gpus.check_memory(args, ranks)
    prompts = on_gpus.agreed(ranks, lambda: read_prompts(args.prompts))
    params = sampling(args, n=args.n, logprobs=args.logprobs)
    files = read_files(args)
    tokenizer, first = files.tokenizer, ranks is None or ranks.rank == 0
    check_stop(params, tokenizer)
    shown = [prompt.text for prompt in prompts]
    texts = shown
    if not args.raw and has_chat_template(args, tokenizer, first=first):
        texts = [chat_prompt(args, tokenizer, [{"role": "user", "content": text}]) for text in shown]
        shown = [f"{text}\n\n" for text in shown]
    try:
        encoded = encode_prompts(texts, tokenizer, files.config.vocab_size)
    except ValueError as error:
        raise ValueError(_in_options(str(error), prompts)) from None
    with on_gpus.errors_of_options():
        loaded = load(args, files, ranks, drafter=args.draft > 0)
    model = loaded.model
    if first:
        say_that_drafts_exist(args, files.config)
    counting = KeysRead(model) if args.stats else contextlib.nullcontext()
    try:
        cache_tokens = _cache_tokens(args, encoded, model.page_size)
        sizes = {"cache_tokens": cache_tokens, "prefill_chunk": args.prefill_chunk, "draft_tokens": args.draft}
        ways = {"prefix_cache": args.prefix_cache, "batch_invariant": args.batch_invariant}
        generator = Generator(model, tokenizer, cuda_graphs=not args.stats, **sizes, **ways)
        if first:
            _say_what_the_context_leaves(encoded, params, model.config.max_position_embeddings)
        with counting as keys:
            progress = PrefillProgress.of(generator) if first else None
            told = {} if progress is None else {"on_prefill": progress}
            events = generator.stream(encoded, params, **told)
            completions = _stream(args, events, encoded, params, prompts, shown, loaded, progress)
    except (OutOfPages, ValueError) as error:
        raise ValueError(_in_options(str(error), prompts)) from None
    if not first:
        return 0  # the first rank says how it went; one that ended otherwise before it would end it
    _report(args, loaded, params, generator.throughput, keys.counts() if args.stats else None)
    failures = [completion.error for completion in completions if completion.error is not None]
    for failure in failures:
        say(f"dsa generate: {_in_options(failure, prompts)}")
    return 1 if failures else 0


def _check_invariant(args: argparse.Namespace) -> None:
    """What `Generator` would refuse once the weights are there."""
    import torch

    if torch.device(device := chosen_device(args)).type != "cuda":
        raise ValueError(f"--batch-invariant: takes a GPU, got {device}")
    if args.dequantize or args.dtype not in (None, "bfloat16"):
        got = "--dequantize" if args.dequantize else f"--dtype {args.dtype}"
        raise ValueError(f"--batch-invariant: takes FP8 weights and bfloat16, got {got}")
    if args.prefix_cache:
        raise ValueError("--batch-invariant: takes no --prefix-cache, which cuts prompts by what others begin with")


def _cache_tokens(args: argparse.Namespace, encoded: list[list[int]], page_size: int) -> int | None:
    """--cache-tokens, or _FEW if the prompts need no more, so that other processes find memory; else None."""
    needed = args.n * sum(len(ids) + args.max_tokens + page_size for ids in encoded)
    return _FEW if args.cache_tokens is None and needed <= _FEW else args.cache_tokens


def _say_what_the_context_leaves(encoded: list[list[int]], params: "SamplingParams", context: int) -> None:
    """Where it is fewer tokens than were asked for. `Generator` refuses a prompt for which it leaves none."""
    left = context - max(len(ids) for ids in encoded)
    if 0 < left < params.max_tokens:
        prompt = "prompt" if len(encoded) == 1 else "longest prompt"
        say(
            f"--max-tokens: the model's context of {context} tokens leaves {left} after the {prompt}, got "
            f"{params.max_tokens}"
        )


def _stream(args, events, encoded, params, prompts, shown, loaded, progress) -> "list[Completion]":
    """Shows every sequence as it comes."""
    from dsa_layers.command.completion_output import JsonEvents, NumberedLines, StreamedText
    from dsa_layers.generation.results import Completion

    encoded, prompts, shown = ([one for one in each for _ in range(params.n)] for each in (encoded, prompts, shown))
    completions = [Completion(len(ids)) for ids in encoded]
    if args.json:
        output = JsonEvents()
        sampling = asdict(params)
        say_json("start", **loaded.facts(), prompts=len(prompts) // params.n, **sampling)
    else:
        output = (StreamedText if len(completions) == 1 else NumberedLines)(sys.stdout)
    with contextlib.closing(output), contextlib.closing(events):
        begun = [] if progress is None else progress.first(events)
        for sequence, text in enumerate(shown):
            output.prompt(sequence, text)
        for event in chain(begun, events):
            completion = completions[event.sequence]
            completion.add(event)
            output.event(event)
            if event.finish_reason is not None:
                output.completion(event.sequence, prompts[event.sequence].text, completion)
    return completions


def _report(
    args: argparse.Namespace,
    loaded: LoadedModel,
    params: "SamplingParams",
    throughput: "Throughput",
    keys: "KeyCounts | None",
) -> None:
    if args.json:
        say_json("throughput", **asdict(throughput))
        if keys is not None:
            say_json("keys_read", **asdict(keys), share=keys.share)
        return
    if keys is not None:
        of = "in its context" if keys.keys_are_tokens else "that dense attention reads"
        say(
            f"keys read: {keys.read:.1f} a token of the {keys.dense:.1f} {of} ({keys.share:.0%}), "
            f"at most {keys.most_read} of {keys.most_dense}"
        )
        if not keys.keys_are_tokens:
            say(
                "keys are the tokens of a window and compressed entries, each of several tokens: a token's context has "
                f"{keys.context:.1f} tokens, at most {keys.longest_context}"
            )
    sampling = f"temperature {params.temperature:g}, top-p {params.top_p:g}" if params.temperature else "greedy"
    weights = ", dequantised" if loaded.dequantized else ""
    say(f"{throughput} ({loaded.device}, backend {loaded.backend}{weights}, {sampling})")


def _in_options(problem: str, prompts: list[Prompt]) -> str:
    """A message of the library with the names of the options: prompts[1] is --prompt-file b.txt."""
    return re.sub(r"^prompts\[(\d+)\]", lambda found: prompts[int(found[1])].source, by_options(problem))
