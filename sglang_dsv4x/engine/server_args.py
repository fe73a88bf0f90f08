"""Seams: SGLang's command line and its ServerArgs. The flags, what is refused, and defaults without a GPU."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from typing import Any, NoReturn, get_type_hints

import torch

from ..config import ConfigError, Dsv4xConfig, flag_name, load_published, publish
from ..jit_kernels.registry import KernelError
from .hooks import Seam, SeamError
from .refusals import RefusedError, refuse_given, refuse_resolved

logger = logging.getLogger(__name__)

CPU_DEFAULT_TOKENS = 65536
"""max_total_num_tokens without a GPU when nothing is said: SGLang would size the pool from all free memory."""

ERRORS = (SeamError, ConfigError, KernelError, RefusedError)


def stop(error: Exception) -> NoReturn:
    """Ends this process with the error's message. SGLang swallows a plug-in's exceptions, but not SystemExit."""
    print(f"\nsglang-dsv4x: {error}\n", file=sys.stderr, flush=True)
    raise SystemExit(1) from error


def add_flags(result: None, parser: argparse.ArgumentParser) -> None:
    """One flag per field of `Dsv4xConfig`, in a group of their own."""
    group = parser.add_argument_group(
        "sglang-dsv4x",
        "DeepSeek-V4 with a tiered C4 cache and the radix prefix cache on. Nothing changes without --enable-dsv4x.",
    )
    group.add_argument("--enable-dsv4x", action="store_true", help="Serve with sglang-dsv4x. Default: off.")
    hints = get_type_hints(Dsv4xConfig)
    for f in fields(Dsv4xConfig):
        if f.name == "enable":
            continue
        number = next(
            (t for t in (int, float) if t is hints[f.name] or t in getattr(hints[f.name], "__args__", ())),
            None,
        )
        assert f.default is not MISSING
        group.add_argument(
            flag_name(f.name),
            dest=f"dsv4x_{f.name}",
            type=number or _word,
            # Absent unless given, so that a flag given without --enable-dsv4x can be told apart.
            default=argparse.SUPPRESS,
            choices=f.metadata["choices"],
            metavar=f.metadata["metavar"],
            help=f"{f.metadata['help']} (default: {'chosen at start' if f.default is None else f.default})",
        )


def _word(text: str) -> str:
    """A choice. YAML reads a bare on or off as a truth value, and SGLang's --config passes it on as true or false."""
    return {"true": "on", "false": "off"}.get(text, text)


def config_from_args(args: argparse.Namespace) -> Dsv4xConfig:
    """The configuration of parsed arguments, on top of what the environment published.

    Raises: ConfigError for a bad value, or for our flags without --enable-dsv4x.
    """
    given = {
        f.name: getattr(args, f"dsv4x_{f.name}")
        for f in fields(Dsv4xConfig)
        if hasattr(args, f"dsv4x_{f.name}")
    }
    published = load_published()
    if not (getattr(args, "enable_dsv4x", False) or published.enable):
        if given:
            names = ", ".join(flag_name(name) for name in given)
            raise ConfigError(f"{names}: nothing happens without --enable-dsv4x; add it, or drop the flag.")
        return Dsv4xConfig()
    return replace(published, enable=True, **given)


def from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    """Reads our flags; with --enable-dsv4x checks everything before SGLang builds its ServerArgs."""
    from .seams import prepare_launch

    try:
        config = config_from_args(args)
        if config.enable:
            publish(config)
            prepare_launch(config)
    except ERRORS as error:
        stop(error)
    return original(cls, args)


def before_resolution(self: Any) -> None:
    """Before ServerArgs resolves itself: refusals that name what the user typed, then defaults without a GPU."""
    config = load_published()
    # SGLang replaces its default by 0.1 for this model; afterwards nobody could tell that from a given 0.1.
    self.dsv4x_swa_ratio_given = self.swa_full_tokens_ratio != type(self).swa_full_tokens_ratio
    try:
        refuse_given(self, config)
    except ERRORS as error:
        stop(error)
    if torch.cuda.is_available():
        return
    if self.device is None:
        self.device = "cpu"
    if self.sampling_backend is None:
        self.sampling_backend = "pytorch"
    if self.max_total_tokens is None:
        self.max_total_tokens = CPU_DEFAULT_TOKENS
        logger.warning("--max-total-tokens is not given: %d without a GPU.", CPU_DEFAULT_TOKENS)


def after_check(result: None, self: Any) -> None:
    """After ServerArgs is resolved and checked by SGLang: refusals that depend on the model and on its defaults."""
    try:
        refuse_resolved(self, load_published())
    except ERRORS as error:
        stop(error)


_ARGS = "sglang.srt.server_args.ServerArgs"

COMMAND_LINE_SEAMS = [
    Seam(
        path=f"{_ARGS}.add_cli_args",
        signature="(parser)",
        kind="after",
        reason="our flags",
        hook=add_flags,
    ),
    Seam(
        path=f"{_ARGS}.from_cli_args",
        signature="(cls, args)",
        kind="around",
        reason="SGLang drops flags that are not its own fields",
        hook=from_cli_args,
    ),
]

VALIDATION_SEAMS = [
    Seam(
        path=f"{_ARGS}.__post_init__",
        signature="(self)",
        kind="before",
        reason="refusals and defaults before SGLang resolves its arguments",
        hook=before_resolution,
    ),
    Seam(
        path=f"{_ARGS}.check_server_args",
        signature="(self)",
        kind="after",
        reason="refusals that need the model's configuration",
        hook=after_check,
    ),
]
