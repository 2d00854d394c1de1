"""The argument parser of the `dsa` command, and functions that print the command's messages."""

import argparse
import json
import re
import sys
from typing import Any

from dsa_bench import command as bench
from dsa_layers import SHIPPED_MODEL
from dsa_layers.cache.drafts import DRAFTS
from dsa_layers.models.registry import FAMILIES
from dsa_layers.options import at_least, gigabytes, path, positive

# A text that the shipped model was not trained on. Its license is LICENSE.python.txt in the same folder.
HELD_OUT_TEXT = SHIPPED_MODEL / "held_out.txt"
COMPARED_TOKENS = 4096  # default of `dsa compare --max-tokens`
SELECTIONS = 16  # the default of `dsa compare --length` is at most this multiple of index_topk
MOST_GPUS = 16  # the largest number of GPUs that `dsa plan` and error messages list


_CONFIG_HELP = (
    "a checkpoint's directory, its hub id, or a config.json by itself (default: the small model that comes with dsa)"
)


class Parser(argparse.ArgumentParser):
    """A parser that raises ValueError for errors. It rejects abbreviated options, because a new option could make an
    abbreviation ambiguous."""

    def __init__(self, **options: object) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> None:
        raise ValueError(f"{message} (see {self.prog} --help)")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import dsa

        print(f"dsa {dsa.__version__}")
        parser.exit()


def make_parser() -> Parser:
    parser = Parser(prog="dsa", description="DeepSeek Sparse Attention: run models, and check what they run on.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_generate(commands)
    _add_chat(commands)
    _add_compare(commands)
    check = commands.add_parser("check", help="print versions, GPU and backend, and test every op")
    check.set_defaults(run=_check)
    _add_compile(commands)
    _add_plan(commands)
    _add_convert(commands)
    bench.add_parsers(commands)
    _add_tiny(commands)
    return parser


def _check(_: argparse.Namespace) -> int:
    from dsa.check import check  # imports torch, which `dsa --help` must avoid

    return check()


def _add_model_options(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    parser.set_defaults(gpus=1, draft=0, cache_tokens=None, json=False)  # for commands that lack these options
    optional = {} if required else {"nargs": "?", "default": SHIPPED_MODEL}
    parser.add_argument(
        "checkpoint",
        type=path,
        help="directory with config.json, safetensors and tokenizer.json, or a hub id, OWNER/NAME"
        + ("" if required else " (default: the small model of Python source that comes with dsa)"),
        **optional,
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda if there is a GPU, else cpu)")
    _add_precision_options(parser, dequantized="yes on a CPU, no on a GPU")
    parser.add_argument(
        "--prefill-chunk",
        type=positive,
        default=2048,
        metavar="N",
        help="prompt tokens per pass (default: %(default)s)",
    )


def _add_precision_options(parser: argparse.ArgumentParser, *, dequantized: str) -> None:
    """Add the options that determine a model's precision. dequantized: the default of --dequantize, as a help text"""
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="dtype of activations, and of weights that are not quantised (default: the checkpoint's)",
    )
    parser.add_argument(
        "--dequantize",
        action=argparse.BooleanOptionalAction,
        help="convert FP8 and FP4 weights to --dtype, and quantise nothing else either, which is faster on a CPU "
        f"(default: {dequantized})",
    )
    parser.add_argument(
        "--kv-cache",
        choices=("fp8", "model"),
        help="store latents in the cache in FP8, or in --dtype (default: fp8 for an FP8 checkpoint that is not "
        "dequantised, else model)",
    )
    parser.add_argument(
        "--widen-experts",
        action="store_true",
        help="convert FP4 experts to FP8 when they are loaded, which takes twice the memory and gives the same results "
        "(default: off, they stay FP4)",
    )


def _add_draft_option(parser: argparse.ArgumentParser, does: str) -> None:
    """Add the option --draft. does: the help text without the default"""
    parser.add_argument(
        "--draft", type=int, choices=range(DRAFTS + 1), default=0, metavar="K", help=f"{does} (default: %(default)s)"
    )


def _add_generation_options(parser: argparse.ArgumentParser, *, max_tokens: int, each: str) -> None:
    """Add --chat-option, --cache-tokens and the options of `SamplingParams`, except --n and --logprobs.

    max_tokens: the default of --max-tokens
    each: "sequence" or "reply", the word for one output in the help texts
    """
    parser.add_argument(
        "--chat-option",
        type=_named_value,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of the chat template or an option of the chat format, as enable_thinking=false, or for V4 "
        "reasoning_effort=max: VALUE is JSON, else a string; may be repeated (default: none)",
    )
    parser.add_argument(
        "--max-tokens",
        type=positive,
        default=max_tokens,
        metavar="N",
        help=f"new tokens per {each}, or what the model's context leaves if that is fewer (default: %(default)s)",
    )
    source = "default: generation_config.json's, else"
    parser.add_argument(
        "--temperature", type=float, metavar="T", help=f"0 is greedy ({source} 0, or 1 if that file says do_sample)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help=f"sample among the fewest tokens whose probabilities reach P ({source} 1: all)",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help=f"sample among the K likeliest tokens ({source} 0: all)")
    parser.add_argument(
        "--min-p", type=float, metavar="P", help=f"drop tokens below P times the likeliest ({source} 0)"
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="R",
        help=f"divide positive logits of tokens that the sequence has by R, multiply others ({source} 1)",
    )
    for name, how in (("presence", "of tokens that were generated"), ("frequency", "as often as it was generated")):
        parser.add_argument(
            f"--{name}-penalty",
            type=float,
            default=0.0,
            metavar="X",
            help=f"subtract X from a logit, {how}, -2 to 2 (default: %(default)s)",
        )
    parser.add_argument(
        "--seed",
        type=int,
        help=f"seed of the first {each}; each further {each} has the next seed (default: others each time)",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end at this string, which is not shown; no special token; may be repeated (default: none)",
    )
    parser.add_argument(
        "--cache-tokens",
        type=positive,
        metavar="N",
        help="the paged cache (default: on a GPU what its memory has room for, on a CPU 65536, and more for one long "
        "sequence; no more than the model's context for each sequence)",
    )


def _named_value(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text[:60]!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


_GENERATE = """\
With --json the standard output is one JSON object a line, each with the key "event":
  start       checkpoint, device, backend, dequantized, prompts, max_tokens, temperature, top_k, top_p, seed, stop, n,
              min_p, repetition_penalty, presence_penalty, frequency_penalty, logprobs
  token       sequence (its number, from 0: n of each prompt one after another), token (its id), text (what can be shown
              by now); with --logprobs also logprobs, a list of token, logprob, rank: the token's, then the likeliest
  completion  sequence, prompt, prompt_tokens, text, tokens, finish_reason ("eos", "stop", "length" or "error"), error
  throughput  prefill_tokens, prefill_seconds, decode_tokens, decode_seconds, drafted, taken (drafts that were right),
              reused_tokens (of prompts, with --prefix-cache)
  error       error, exit_code: nothing follows, but with --gpus perhaps another one, of the rank that is the cause
Exit codes: 0; 1 where a sequence or the command failed; 2 for a wrong call or input; 130 after Ctrl-C."""


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser("generate", help="continue prompts with a checkpoint", epilog=_GENERATE)
    _add_model_options(parser)
    parser.add_argument(
        "--gpus",
        type=positive,
        default=None,
        metavar="N",
        help="split the model over N GPUs of this machine, a process each, or with --device cpu over N processes; "
        "torchrun may start them too (default: 1)",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        dest="prompts",
        metavar="TEXT",
        help="a prompt, or - for the standard input; may be repeated, for a batch, whose sequences are printed when "
        "they end, with [i] before each line, the sequence's number from 0 on (default: none; one is needed)",
    )
    parser.add_argument(
        "--prompt-file",
        type=path,
        action="append",
        dest="prompts",
        metavar="FILE",
        help="a UTF-8 file that holds one prompt, without the newline at its end; may be repeated and mixed with "
        "--prompt (default: none)",
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help="send prompts as they are (default: off; as messages, by the chat template or format if there is one)",
    )
    _add_generation_options(parser, max_tokens=256, each="sequence")
    parser.add_argument(
        "--prefix-cache",
        action="store_true",
        help="prompts that begin with the same tokens share their full pages, which are computed once; the output "
        "matches that without up to rounding (default: off)",
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="on GPUs, with FP8 weights, FP8 indexers and bfloat16: the tokens of a prompt, sampled ones with --seed, "
        "depend on no other prompt and not on drafts, bit for bit, which is slower (default: off)",
    )
    _add_draft_option(
        parser,
        f"draft up to {DRAFTS} tokens ahead by the checkpoint's multi-token-prediction layer, so that a pass may give "
        "several",
    )
    parser.add_argument("--n", type=int, default=1, help="sequences of each prompt (default: %(default)s)")
    parser.add_argument(
        "--logprobs",
        type=int,
        metavar="K",
        help="with --json: log-probabilities of each token and of the K likeliest ones (default: none)",
    )
    parser.add_argument("--json", action="store_true", help="print events in JSON, see below (default: off)")


_CHAT = """\
Each line of the standard input is a message, or one of these:
/reset  forget the conversation
/exit   end, as does Ctrl-D
Ctrl-C ends a reply; at the prompt it ends the program.
Reasoning is printed between <think> and </think>.
Exit codes: 0; 1 where a reply failed; 2 for a wrong call or input; 130 after Ctrl-C."""


def _add_chat(commands: Any) -> None:
    parser = commands.add_parser("chat", help="talk with a checkpoint on the terminal", epilog=_CHAT)
    # No --gpus: Ctrl-C could end a reply after a different number of tokens on each rank. A checkpoint is required,
    # because the small model has no chat format.
    _add_model_options(parser, required=True)
    parser.add_argument("--system", default="", metavar="TEXT", help="the system message (default: none)")
    _add_generation_options(parser, max_tokens=4096, each="reply")
    _add_draft_option(
        parser, "draft so many tokens ahead by the checkpoint's multi-token-prediction layer, as `dsa generate` does"
    )


_COMPARE = """\
With --json the standard output is one JSON object a line, each with the key "event":
  start      checkpoint, device, backend, dequantized, text, sequences, length, index_topk
  attention  attention ("sparse", "latest" or "dense"), loss, perplexity, tokens, seconds, read (keys per
             token), dense (what dense attention over the same cache reads), context, share (read / dense)
  error      error, exit_code: nothing follows"""


def _add_compare(commands: Any) -> None:
    parser = commands.add_parser(
        "compare",
        help="loss, perplexity and keys read on a text: sparse and dense attention",
        description="The loss of the same weights with the keys that the indexers select, with as many keys that are "
        "the latest, and with all keys.",
        epilog=_COMPARE,
    )
    _add_model_options(parser)
    parser.add_argument(
        "--text",
        type=path,
        metavar="FILE",
        default=HELD_OUT_TEXT,
        help="a UTF-8 text that the model was not trained on (default: a module of Python's standard library that "
        "was held out when the model that comes with dsa was trained)",
    )
    parser.add_argument(
        "--length",
        type=at_least(2),
        metavar="N",
        help=f"tokens per sequence, at least 2 (default: the model's context, {SELECTIONS} times what a token selects, "
        "the text, or --max-tokens if that is given, whichever is shortest)",
    )
    parser.add_argument(
        "--max-tokens",
        type=at_least(2),
        metavar="N",
        help="tokens from the beginning of the text, in whole sequences, at least one of them (default: "
        f"{COMPARED_TOKENS})",
    )
    parser.add_argument("--json", action="store_true", help="print events in JSON, see below (default: off)")


_COMPILE = """\
Compiles what `dsa generate` would compile when it first needs it: every variant of the kernels that prefill and
decoding of the model ask for, for any number of tokens and sequences. It needs no GPU and reads no weights, only
config.json.
The folder serves every machine whose CPU is of the same architecture and that has the same version of dsa, of the DSL
and of TVM-FFI: copy it there and set DSA_CACHE_DIR to it. What is in it already is not compiled again."""


def _add_compile(commands: Any) -> None:
    parser = commands.add_parser(
        "compile", help="compile a model's kernels in advance, without a GPU", description=_COMPILE
    )
    parser.add_argument(
        "--model", type=path, default=SHIPPED_MODEL, dest="checkpoint", metavar="CONFIG", help=_CONFIG_HELP
    )
    parser.add_argument(
        "--gpus",
        type=positive,
        default=1,
        metavar="N",
        help="the kernels of one of N GPUs that share the model, as dsa generate --gpus N needs them (default: "
        "%(default)s)",
    )
    _add_draft_option(parser, "as dsa generate has it")
    parser.add_argument(
        "--out",
        type=path,
        metavar="DIR",
        help="the folder, which must be writable only by you (default: DSA_CACHE_DIR, else dsa in XDG_CACHE_HOME, else "
        "~/.cache/dsa)",
    )
    _add_precision_options(parser, dequantized="off")
    parser.add_argument(
        "--jobs",
        type=positive,
        metavar="N",
        help="compiling processes (default: one per core that is free to use)",
    )


_PLAN = """\
Reads config.json, and no weights. Weights are shared by the GPUs: attention by heads, MLPs by their inner channels,
experts by their number, embeddings and the head by the vocabulary. Every GPU has the weights of shared experts whole,
and if its share of the heads is below 64, those of attention with all heads: long passes are split by tokens there.
Every GPU has all of the cache. The context, of all sequences together, is the number of tokens that fit into 90% of a
GPU's memory together with the weights; --draft K takes K tokens more per sequence."""


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser("plan", help="what each of several GPUs would hold of a model", description=_PLAN)
    parser.add_argument("checkpoint", type=path, nargs="?", default=SHIPPED_MODEL, help=_CONFIG_HELP)
    parser.add_argument(
        "--gpus",
        type=positive,
        metavar="N",
        help=f"this number alone (default: every number up to {MOST_GPUS})",
    )
    parser.add_argument(
        "--memory",
        type=gigabytes,
        metavar="GB",
        help="memory of a GPU in 10^9 bytes, as 139.8 (default: that of the GPU here, else 80)",
    )
    _add_draft_option(parser, "with the checkpoint's multi-token-prediction layer, as dsa generate has it")
    _add_precision_options(parser, dequantized="off")


_CONVERT = """\
Writes the checkpoint anew with weights in BF16, FP8 or FP4, one file at a time, and copies the tokenizer. Weights that
have this dtype already are copied. After an interruption the same command continues with the file that it was at."""


def _add_convert(commands: Any) -> None:
    parser = commands.add_parser("convert", help="write a checkpoint in BF16, FP8 or FP4", description=_CONVERT)
    parser.add_argument("checkpoint", type=path, help="its directory or hub id")
    parser.add_argument("directory", type=path, help="new or empty")
    parser.add_argument(
        "--dtype",
        required=True,
        choices=("bf16", "fp8", "fp4"),
        help="fp8: projections and experts; fp4: experts, and FP8 for other projections",
    )
    parser.add_argument(
        "--shard-gb",
        type=gigabytes,
        default="5",
        metavar="GB",
        help="10^9 bytes per file at most (default: %(default)s)",
    )
    parser.add_argument("--device", help="where weights are cast: cpu, cuda or cuda:N (default: a GPU if there is one)")


def _add_tiny(commands: Any) -> None:
    parser = commands.add_parser("tiny", help="write a small random checkpoint in a family's published format")
    parser.add_argument("directory", type=path, help="new or empty")
    parser.add_argument(
        "--model", choices=tuple(FAMILIES), default="deepseek_v32", help="its model_type (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights (default: %(default)s)")


# {parameter of the library: option}, for options that are not named after the parameter
_OPTIONS = {"draft_tokens": "--draft", "drafter": "--draft"}
_POSITIONAL = {"checkpoint", "directory", "op"}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def say_json(event: str, **fields: object) -> None:
    """Print an event as a line of JSON."""
    print(json.dumps({"event": event, **fields}), flush=True)


def by_options(problem: str, args: argparse.Namespace) -> str:
    """Replace parameter names at the start or the end of an error message by the command's options: "top_p: ..."
    becomes "--top-p: ...", and "... (cache_tokens)" becomes "... (--cache-tokens)"."""
    options = {name: f"--{name.replace('_', '-')}" for name in vars(args).keys() - _POSITIONAL} | _OPTIONS
    return re.sub(r"(^|(?<=\())\w+(?=:|\)$)", lambda found: options.get(found[0], found[0]), problem)
