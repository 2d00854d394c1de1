"""`dsa convert`: a checkpoint with weights in another dtype."""

import argparse

from dsa_layers import convert_checkpoint


def run(args: argparse.Namespace) -> int:
    convert_checkpoint(args.checkpoint, args.directory, args.dtype, shard_bytes=args.shard_gb, device=args.device)
    size = sum(path.stat().st_size for path in args.directory.glob("*.safetensors"))
    print(f"wrote {args.directory}: {size / 1e9:.2f} GB of weights")
    return 0
