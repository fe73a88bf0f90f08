"""A byte-level tokenizer with DeepSeek-V4's special tokens and a chat template.

Every byte is one token, so that any text round-trips and token counts are easy to control. The special tokens are those
that DeepSeek's chat format and SGLang's encoder for it (`encoding_dsv4.py`) use. Ids beyond bytes and special tokens
are short words that no text encodes to: a random model generates them, and they must decode to something.
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import MakeModelError

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
SPECIAL_TOKENS = (
    BOS,
    EOS,
    PAD,
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
)
"""Ids from 0 on."""

FIRST_BYTE_ID = len(SPECIAL_TOKENS)
"""Byte b is token FIRST_BYTE_ID + b."""

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] in ('system', 'developer') %}{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<｜Assistant｜></think>' + message['content'] + eos_token }}"
    "{% else %}{{ '<｜User｜>' + message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}"
    "{% endif %}"
)


def write_tokenizer(folder: Path, vocab_size: int, max_length: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja.

    Raises MakeModelError when `vocab_size` does not hold 256 bytes and the special tokens.
    """
    needed = FIRST_BYTE_ID + 256
    if vocab_size < needed:
        raise MakeModelError(
            f"vocab_size is {vocab_size}; a byte-level tokenizer needs {needed}: 256 bytes and {FIRST_BYTE_ID} "
            "special tokens."
        )
    tokenizer = _tokenizer_json(vocab_size)
    (folder / "tokenizer.json").write_text(
        json.dumps(tokenizer, ensure_ascii=False, indent=1), encoding="utf-8"
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    text = json.dumps(settings, ensure_ascii=False, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary, index = byte.

    Printable Latin-1 bytes stand for themselves, the others for the characters from U+0100 on, in order (GPT-2's
    `bytes_to_unicode`).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = itertools.count(0x100)
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]


def _words() -> Iterator[str]:
    for length in itertools.count(2):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            yield "".join(letters)


def _tokenizer_json(vocab_size: int) -> dict[str, Any]:
    tokens = [*SPECIAL_TOKENS, *byte_characters()]
    tokens += itertools.islice(_words(), vocab_size - len(tokens))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, token in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [],
        },
    }
