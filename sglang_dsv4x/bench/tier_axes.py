"""Are tier-on outputs the tier-off bits? The shipped trace, one axis of the tier's settings changed at a time.

Every row is a real server of its own and one replay. Rows are compared with the tier-off server of the same chunk size,
since chunk size alone changes the last bits. The hot cache is as small as each setting allows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import configs
from ..demo import CHUNK_TOKENS, FETCH_UNIT, MODEL, DemoStopped, replayed, server_arguments
from ..launch import LaunchError
from ..make_model import MakeModelError, make_model
from ..replay import compare, table
from ..replay.client import RequestError
from ..replay.records import Run
from ..replay.summary import miss_share
from .record import record, write

FETCH_UNITS = (1, 2, 4, 8)
CHUNKS = (256, 1024, 4096)
DELAY_MS = 5


class Case(NamedTuple):
    """One server: what differs from the base."""

    name: str
    chunk_tokens: int = CHUNK_TOKENS
    fetch_unit: int = FETCH_UNIT
    extra: tuple[str, ...] = ()


def main(argv: Sequence[str]) -> int:
    """Runs it and prints a table. Returns 1 when a bit differs or a server fails, 130 when interrupted."""
    parser = argparse.ArgumentParser(
        "sglang-dsv4x bench tier-axes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the result as JSON")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(".cache/tier-axes"),
        metavar="DIR",
        help="folder for the model, logs and replay reports (default %(default)s)",
    )
    parser.add_argument("--max-turns", type=int, metavar="N", help="replay only the first N turns")
    parser.add_argument("--no-progress", action="store_true", help="no progress bars")
    args = parser.parse_args(argv)
    out = args.out.expanduser().resolve()
    try:
        make_model(configs.load(MODEL), out / "model", seed=0, force=True)
        rows = list(compared(out, args.max_turns, not args.no_progress))
    except (MakeModelError, LaunchError, RequestError, DemoStopped, OSError) as error:
        print(f"sglang-dsv4x bench tier-axes: {error}", file=sys.stderr)
        return error.code if isinstance(error, DemoStopped) else 1
    except KeyboardInterrupt:
        print("sglang-dsv4x bench tier-axes: interrupted", file=sys.stderr)
        return 130
    print(as_table(rows))
    if args.json is not None:
        settings = {"model": MODEL, "max_turns": args.max_turns, "delay_ms": DELAY_MS}
        write(args.json, record("tier-axes", argv, settings, rows))
    return 0 if all(row["identical"] for row in rows) else 1


def cases(chunk_tokens: int) -> list[Case]:
    """The servers with the tier on that one tier-off server of this chunk size is compared with."""
    base = Case(f"chunk {chunk_tokens}", chunk_tokens)
    if chunk_tokens != CHUNK_TOKENS:
        return [base]
    units = [
        base._replace(name=f"fetch unit {unit}", fetch_unit=unit)
        for unit in FETCH_UNITS
        if unit != FETCH_UNIT
    ]
    delayed = base._replace(
        name=f"copies {DELAY_MS} ms late, checked",
        extra=("--dsv4x-copy-delay-ms", str(DELAY_MS), "--dsv4x-checks", "step"),
    )
    return [base, *units, delayed]


def compared(out: Path, max_turns: int | None, progress: bool) -> Iterator[dict[str, Any]]:
    """Runs every case and yields one row each. Raises what `demo.replayed` raises."""

    def run(label: str, tier: str, case: Case) -> Run:
        argv = server_arguments(
            out / "model",
            tier,
            chunk_tokens=case.chunk_tokens,
            fetch_unit=case.fetch_unit,
            extra=case.extra,
        )
        return replayed(label, argv, out, max_turns=max_turns, progress=progress)

    for chunk in CHUNKS:
        off = compare.outputs_of(run(f"off-chunk-{chunk}", "off", Case("off", chunk)))
        for case in cases(chunk):
            on = run("on-" + case.name.replace(",", "").replace(" ", "-"), "on", case)
            result = compare.compare(off, compare.outputs_of(on))
            tier = on.tier or {}
            yield {
                **case._asdict(),
                "identical": result.identical and result.logprobs > 0,
                "turns": result.turns,
                "equal_turns": result.equal_turns,
                "logprobs": result.logprobs,
                "equal_logprobs": result.equal_logprobs,
                "first_difference": result.first_difference,
                "selected": tier.get("selected"),
                "miss_share": miss_share(on.tier),
                "bytes_to_device": tier.get("bytes_to_device"),
                "bytes_to_host": tier.get("bytes_to_host"),
            }


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """The closing table."""
    lines = [("tier on", "equal turns", "equal log-probabilities", "selected", "missed", "to device")]
    for row in rows:
        share, moved = row["miss_share"], row["bytes_to_device"]
        lines.append(
            (
                row["name"],
                f"{row['equal_turns']} of {row['turns']}",
                f"{row['equal_logprobs']} of {row['logprobs']}",
                f"{row['selected']:,}" if row["selected"] is not None else "-",
                "-" if share is None else table.percent(share),
                "-" if moved is None else f"{moved / 2**20:,.1f} MiB",
            )
        )
    return "\n".join(["", *table.aligned(lines)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
