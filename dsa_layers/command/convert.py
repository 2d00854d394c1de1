"""`dsa convert`: a checkpoint with weights in another dtype."""

import argparse

from dsa_layers import options

_TEXT = """\
Writes the checkpoint anew with weights in BF16, FP8 or FP4, one file at a time, and copies the tokenizer. Weights that
have this dtype already are copied. After an interruption the same command continues with the file that it was at."""
GB = 10**9


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("convert", help="write a checkpoint in BF16, FP8 or FP4", description=_TEXT)
    parser.set_defaults(run=run)
    parser.add_argument("checkpoint", type=options.path, help="its directory or hub id")
    parser.add_argument("directory", type=options.path, help="new or empty")
    parser.add_argument(
        "--dtype",
        required=True,
        choices=("bf16", "fp8", "fp4"),
        help="fp8: projections and experts; fp4: experts, and FP8 for other projections",
    )
    parser.add_argument("--shard-gb", type=options.size, default=5.0, metavar="GB", help="10^9 bytes of a file at most")
    parser.add_argument("--device", help="where weights are cast: cpu, cuda or cuda:N (default: a GPU if there is one)")


def run(args: argparse.Namespace) -> int:
    from dsa_layers.io.save import convert_checkpoint

    shard_bytes = max(int(args.shard_gb * GB), 1)
    convert_checkpoint(args.checkpoint, args.directory, args.dtype, shard_bytes=shard_bytes, device=args.device)
    size = sum(path.stat().st_size for path in args.directory.glob("*.safetensors"))
    print(f"wrote {args.directory}: {size / GB:.2f} GB of weights")
    return 0
