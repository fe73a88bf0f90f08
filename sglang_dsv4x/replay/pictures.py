"""Where a report becomes files to look at; matplotlib is imported only here and behind this module."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from sglang_dsv4x.replay.records import Run


class PicturesError(RuntimeError):
    """Plots cannot be drawn here; the message says what to install."""


def check_pictures() -> None:
    """Raises PicturesError where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PicturesError(
            "--html and --png draw with matplotlib, which is not installed: pip install 'sglang-dsv4x[plot]'"
        )


def write_pictures(runs: Sequence[Run], html: Path | None, png: Path | None) -> None:
    """Writes the page and the picture that are asked for. Raises PicturesError, OSError."""
    if html is None and png is None:
        return
    check_pictures()
    from sglang_dsv4x.replay import page, plots

    if html is not None:
        _write(html, page.render(runs).encode("utf-8", "replace"))
    if png is not None:
        _write(png, plots.png(runs))


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    os.replace(part, path)
