"""Model shapes (`tiny`, `flash`, `pro`, ...) and launch presets for SGLang's `--config`.

A shape is a Hugging Face `config.json` with the keys and values of the released checkpoints. `flash` and `pro` are
the released shapes; `tiny` keeps their attention geometry (head 512 = 448 + 64 rotary, index head 128, ratios 0, 4
and 128) and shrinks everything else, so that it runs on a CPU and selects from 260 tokens on (top-k 64).
`tiny-dense-moe` is `tiny` with every expert active: no routing decision can flip, for tight numerical comparisons.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent


class UnknownConfigError(ValueError):
    """No such shape or preset, or a file that is not a model configuration; the message says what would do."""


def available() -> list[str]:
    """Names that `load` knows, sorted."""
    return sorted(path.stem for path in _HERE.glob("*.json"))


def load(name_or_path: str | Path) -> dict[str, Any]:
    """The configuration of a shape by name, or of a `config.json`, or of a directory that holds one.

    A name wins over a file of the same name in the working directory. Raises UnknownConfigError when there is no such
    thing or it is not a JSON object.
    """
    if str(name_or_path) in available():
        return _read(_HERE / f"{name_or_path}.json")
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        names = ", ".join(available())
        raise UnknownConfigError(
            f"{str(name_or_path)!r} is neither a known shape ({names}) nor a config.json."
        )
    return _read(path)


def presets() -> list[str]:
    """Names that `preset` knows, sorted."""
    return sorted(path.stem for path in _HERE.glob("*.yaml"))


def preset(name: str) -> Path:
    """Path of a launch preset, to pass as `python -m sglang.launch_server --config PATH`.

    Raises UnknownConfigError when there is none of that name.
    """
    if name not in presets():
        raise UnknownConfigError(f"{name!r} is not a launch preset; there are: {', '.join(presets())}.")
    return _HERE / f"{name}.yaml"


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UnknownConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UnknownConfigError(f"{path} holds a {type(config).__name__}, not a JSON object.")
    return config
