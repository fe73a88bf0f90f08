"""The command `sglang-dsv4x make-model`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .. import configs
from .checkpoint import make_model
from .errors import MakeModelError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(configs.available())
    parser.add_argument("config", metavar="NAME-OR-CONFIG", help=f"{names}, or the path of a config.json")
    parser.add_argument(
        "out", metavar="OUT", type=Path, help="folder to write; it appears only when complete"
    )
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes (default 0)")
    parser.add_argument("--force", action="store_true", help="replace the checkpoint that OUT holds")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0, 1 with the reason on stderr, or 130 after Ctrl-C, which leaves nothing behind."""
    try:
        make_model(
            configs.load(args.config),
            args.out,
            seed=args.seed,
            force=args.force,
            progress=sys.stderr.isatty(),
        )
    except (configs.UnknownConfigError, MakeModelError, OSError) as error:
        print(f"make-model: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("make-model: interrupted; nothing was written.", file=sys.stderr)
        return 130
    print(f"{args.out}: {args.config}, seed {args.seed}")
    return 0
