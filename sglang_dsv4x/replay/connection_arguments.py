"""Arguments that say how to reach a server, the same in every command that talks to one."""

from __future__ import annotations

import argparse
import os
import ssl
from pathlib import Path

from sglang_dsv4x.replay.client import Connection

API_KEY_VARIABLE = "OPENAI_API_KEY"


class ConnectionArgumentError(ValueError):
    """A connection cannot be made with these arguments; the message names the flag."""


def add_connection_arguments(group: argparse._ArgumentGroup, *, timeout_s: float = 600.0) -> None:
    """Adds --api-key, --ca-file, --insecure and --timeout."""
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"key sent as 'Authorization: Bearer KEY' (default: the environment variable {API_KEY_VARIABLE}, "
        "which other users of this machine cannot see); never written to a report",
    )
    group.add_argument(
        "--ca-file", type=Path, metavar="PEM", help="trust these certificate authorities too (https)"
    )
    group.add_argument("--insecure", action="store_true", help="accept any certificate (https)")
    group.add_argument(
        "--timeout",
        type=positive_float,
        default=timeout_s,
        metavar="S",
        help="seconds from sending a request to its last byte, after which it counts as failed "
        "(default %(default)g)",
    )


def connection_of(args: argparse.Namespace) -> Connection:
    """The connection that the arguments ask for. Raises ConnectionArgumentError for a useless CA file."""
    key = args.api_key or os.environ.get(API_KEY_VARIABLE) or None
    connection = Connection(args.timeout, key, args.ca_file, args.insecure)
    try:
        connection.tls()
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConnectionArgumentError(
            f"--ca-file {args.ca_file}: holds no certificates in PEM ({reason})"
        ) from error
    return connection


def base_url(text: str) -> str:
    """A URL with a scheme and a host, for `type=` of an argument."""
    scheme, separator, rest = text.partition("://")
    if scheme not in ("http", "https") or not separator or not rest.strip("/"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL such as http://127.0.0.1:30000")
    return text


def positive_int(text: str) -> int:
    """For `type=` of an argument."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return value


def count(text: str) -> int:
    """An integer from 0 on, for `type=` of an argument."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def positive_float(text: str) -> float:
    """For `type=` of an argument."""
    value = factor(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def factor(text: str) -> float:
    """A finite number from 0 on, for `type=` of an argument."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number that is not negative")
    return value
