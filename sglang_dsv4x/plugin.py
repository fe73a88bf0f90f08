"""SGLang's entry point into this package (group `sglang.srt.plugins`).

SGLang calls `register` in the process that starts a server, before it parses arguments, and first thing in every
scheduler process. It logs and forgets exceptions, so whatever must stop the server is raised as SystemExit.
"""

from __future__ import annotations

import multiprocessing
import sys


def register() -> None:
    """Installs the flags; where the extension is enabled already, everything. Never fatal without our flag.

    Raises: SystemExit, with the reason on stderr, when the extension is wanted and anything is off.
    """
    try:
        _register()
    except Exception as error:
        if _wanted():
            print(f"\nsglang-dsv4x: {error}\n", file=sys.stderr, flush=True)
            raise SystemExit(1) from error
        raise


def _register() -> None:
    from .config import load_published
    from .engine import seams

    seams.install_command_line()
    config = load_published()
    if not config.enable:
        return
    # Here for `sglang.Engine`, whose arguments do not come through a command line.
    seams.prepare_launch(config)
    # A child process is a scheduler, or somebody's worker that starts an Engine, which the engine's seams leave alone.
    if multiprocessing.parent_process() is not None:
        seams.install_engine(config)


def _wanted() -> bool:
    """Has the extension been asked for? Also true when its JSON cannot be read: that must not be ignored."""
    from .config import ConfigError, load_published

    if any(arg == "--enable-dsv4x" for arg in sys.argv):
        return True
    try:
        return load_published().enable
    except ConfigError:
        return True
