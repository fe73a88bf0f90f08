"""Writes a whole checkpoint, or nothing."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from .errors import MakeModelError
from .fill import slices
from .safetensors_writer import write_shards
from .shape import ModelShape
from .tensors import TensorSpec, checkpoint_tensors
from .tokenizer import write_tokenizer

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_OWN_FILES = re.compile(
    r"config\.json|generation_config\.json|tokenizer\.json|tokenizer_config\.json|chat_template\.jinja"
    r"|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
)
_HEADROOM_BYTES = 64 << 20
"""For headers, tokenizer and file-system overhead."""


def make_model(
    config: dict[str, Any],
    out: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    force: bool = False,
    progress: bool = False,
) -> None:
    """Writes a random, well-scaled checkpoint of the shape `config` into the folder `out`.

    Tensors have the released names, which both SGLang and transformers read. They are stored in `dtype` (float32 where
    the released checkpoints are), never quantised: `quantization_config` and `expert_dtype` are dropped, and so are the
    MTP blocks. The same config, seed and dtype give the same bytes. `out` appears only when it is complete.

    Raises MakeModelError for an impossible config, an `out` that is in use, or too little free disk.
    """
    if dtype not in DTYPES:
        raise MakeModelError(f"dtype is {dtype}; choose one of {', '.join(DTYPES.values())}.")
    shape = ModelShape.of(config)
    specs = list(checkpoint_tensors(shape, dtype))
    out = out.expanduser().resolve()
    _check_target(out, force)
    out.parent.mkdir(parents=True, exist_ok=True)
    _check_disk(specs, out.parent)
    partial_folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    try:
        partial_folder.chmod(0o755)
        _fill_folder(partial_folder, config, shape, specs, seed, dtype, progress)
        _put_in_place(partial_folder, out)
    finally:
        if partial_folder.exists():
            shutil.rmtree(partial_folder)


def checkpoint_config(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """`config` as it describes what `make_model` writes: unquantised, without MTP blocks."""
    result = {
        key: value for key, value in config.items() if key not in ("quantization_config", "expert_dtype")
    }
    result.update(
        architectures=["DeepseekV4ForCausalLM"],
        torch_dtype=DTYPES[dtype],
        num_nextn_predict_layers=0,
        compress_ratios=config["compress_ratios"][: config["num_hidden_layers"]],
    )
    return result


def _fill_folder(
    folder: Path,
    config: dict[str, Any],
    shape: ModelShape,
    specs: list[TensorSpec],
    seed: int,
    dtype: torch.dtype,
    progress: bool,
) -> None:
    write_tokenizer(folder, shape.vocab_size, int(config.get("max_position_embeddings", 65536)))
    total = sum(spec.nbytes for spec in specs)
    with tqdm(total=total, unit="B", unit_scale=True, desc="weights", disable=not progress) as bar:
        write_shards(specs, folder, partial(slices, seed=seed), bar.update)
    generation = {
        "bos_token_id": config.get("bos_token_id", 0),
        "eos_token_id": config.get("eos_token_id", 1),
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 1.0,
    }
    _write_json(folder / "generation_config.json", generation)
    _write_json(folder / "config.json", checkpoint_config(config, dtype))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _check_target(out: Path, force: bool) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise MakeModelError(f"{out} is not a folder; choose another OUT.")
    present = sorted(path.name for path in out.iterdir())
    if present and not force:
        raise MakeModelError(
            f"{out} is not empty; choose another OUT, or replace its checkpoint with --force."
        )
    foreign = [name for name in present if not _OWN_FILES.fullmatch(name)]
    if foreign:
        raise MakeModelError(
            f"{out} holds files that are not of a checkpoint ({', '.join(foreign[:5])}), which --force would delete; "
            "move them away or choose another OUT."
        )


def _check_disk(specs: list[TensorSpec], folder: Path) -> None:
    needed = sum(spec.nbytes for spec in specs) + _HEADROOM_BYTES
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise MakeModelError(
            f"the checkpoint needs {needed:,} bytes ({needed / 2**30:.1f} GiB), {folder} has {free:,} free "
            f"({free / 2**30:.1f} GiB); choose an OUT on a larger disk or a smaller config."
        )


def _put_in_place(complete: Path, out: Path) -> None:
    """Renames `complete` to `out`; a checkpoint that was there goes only once the new one has its place."""
    if not out.exists() or not any(out.iterdir()):
        complete.rename(out)
        return
    replaced = Path(tempfile.mkdtemp(prefix=f".{out.name}.replaced-", dir=out.parent)) / out.name
    out.rename(replaced)
    complete.rename(out)
    shutil.rmtree(replaced.parent)
