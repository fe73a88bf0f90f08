"""Run by tests as a program: what SGLang looks like after it loaded its plug-ins and parsed a command line.

Prints one JSON object. Arguments: the server's.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import pkgutil
import sys
from typing import Any


def attribute(path: str) -> Any:
    """What the owner holds under that name, not what a lookup through it would bind."""
    owner, name = path.rsplit(".", 1)
    return inspect.getattr_static(pkgutil.resolve_name(owner), name)


def main() -> None:
    # Before SGLang calls any plug-in, so that these are its own objects.
    from sglang_dsv4x.engine import seams

    paths = [row.path for row in [*seams.argument_seams(), *seams.engine_seams()]]
    backends = "sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS"
    before = {path: attribute(path) for path in paths}
    registered = dict(attribute(backends))

    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    args = prepare_server_args(sys.argv[1:])
    args.check_server_args()
    changed = [path for path, was in before.items() if attribute(path) is not was]
    if attribute(backends) != registered:
        changed.append(backends)
    result = {
        "changed": changed,
        "args": {f.name: repr(getattr(args, f.name)) for f in dataclasses.fields(args)},
        "environment": dict(os.environ),
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
