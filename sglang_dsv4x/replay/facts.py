"""What a replay must know about the server: limits, page size, vocabulary, and the tier's counters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dsv4x.replay.client import Api, RequestError
from sglang_dsv4x.replay.http import Http
from sglang_dsv4x.replay.tokens import Vocabulary, VocabularyError

_WORDS = 26**3  # a chat's prompts are words: of at most three letters
DEFAULT_PAGE_SIZE = 256  # DeepSeek-V4's in SGLang
TIER_KEY = "dsv4x"  # this extension's entry in each internal state of /server_info

# Settings that decide output bits or speed; copied into the report where the server names them.
_REPORTED = (
    "version",
    "model_path",
    "device",
    "dtype",
    "kv_cache_dtype",
    "attention_backend",
    "page_size",
    "chunked_prefill_size",
    "max_running_requests",
    "max_total_num_tokens",
    "swa_full_tokens_ratio",
    "disable_radix_cache",
    "disable_overlap_schedule",
    "tp_size",
)


class ServerFacts(NamedTuple):
    """`longest_request` is prompt plus output in tokens; `page_size` is the prefix cache's granularity in
    tokens; None when unknown. `model` is the name by which OpenAI's interface calls it; `reported` is for the
    report.
    """

    api: Api
    model: str | None
    page_size: int | None
    longest_request: int | None
    model_path: str | None
    vocab_size: int | None
    reported: dict[str, Any]


async def read_facts(http: Http, api: Api | None = None) -> ServerFacts:
    """Asks the server what it is. `api` None: SGLang's interface where there is one, else OpenAI's.

    Raises RequestError when it does not answer, refuses the key or has neither interface.
    """
    info: dict[str, Any] = {}
    try:
        info = await http.get_json("/server_info")
    except RequestError as error:
        if api == "sglang" or not _not_there(error):
            raise
    if api is None:
        api = "sglang" if info else "openai"
    if api == "sglang":
        model = await http.get_json("/model_info")
        return _facts(api, info, model.get("model_path"), None, model)
    listed = await http.get_json("/v1/models")
    models = listed.get("data")
    first = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
    name = first.get("id")
    return _facts(api, info, first.get("root") or name, name if isinstance(name, str) else None, first)


def _facts(api: Api, info: dict[str, Any], path: Any, name: str | None, model: dict[str, Any]) -> ServerFacts:
    path = path or info.get("model_path")
    reported: dict[str, Any] = {"api": api}
    if name is not None:
        reported["model"] = name
    reported.update({key: info[key] for key in _REPORTED if info.get(key) is not None})
    reported.update({k: v for k, v in info.items() if "dsv4x" in k and v is not None})
    tier = [state[TIER_KEY] for state in _states(info) if isinstance(state.get(TIER_KEY), dict)]
    if tier:
        reported[TIER_KEY] = {k: v for k, v in tier[0].items() if k != "counters"}
    return ServerFacts(
        api=api,
        model=name,
        page_size=_positive(info.get("page_size")),
        longest_request=_positive(info.get("max_req_input_len")) or _positive(model.get("max_model_len")),
        model_path=path if isinstance(path, str) else None,
        vocab_size=_positive(info.get("vocab_size")) or _positive(model.get("vocab_size")),
        reported=reported,
    )


def find_vocabulary(servers: Sequence[ServerFacts], vocab_size: int | None) -> Vocabulary:
    """Ordinary token ids that all servers have: below `vocab_size`, or the smallest of their vocabularies, as
    each says itself or as its model folder does where it can be read here.

    Special ids are left out where the model folder names them. Raises VocabularyError when nobody knows a
    size or it is too small.
    """
    sizes: list[int] = []
    special: set[int] = set()
    for facts in servers:
        if facts.api == "openai-chat":
            sizes.append(vocab_size or _WORDS)
            continue
        folder = Path(facts.model_path) if facts.model_path else None
        config = _read_json(folder / "config.json") if folder else {}
        size = vocab_size or facts.vocab_size or _positive(config.get("vocab_size"))
        if size is None:
            raise VocabularyError(
                "The server does not say how large its vocabulary is, and its model "
                f"({facts.model_path or 'of unknown path'}) cannot be read here. "
                "Give it with --vocab-size (129280 for DeepSeek-V4)."
            )
        sizes.append(size)
        special |= _special_ids(config, _read_json(folder / "tokenizer.json") if folder else {})
    return Vocabulary(min(sizes), special)


async def read_tier_counters(http: Http) -> dict[str, int] | None:
    """The tier's counters since the server started, summed over data-parallel ranks; None without a tier.

    Raises RequestError when the server does not answer.
    """
    try:
        info = await http.get_json("/server_info")
    except RequestError as error:
        if _not_there(error):
            return None
        raise
    totals: dict[str, int] = {}
    for state in _states(info):
        tier = state.get(TIER_KEY)
        counters = tier.get("counters") if isinstance(tier, dict) else None
        for name, value in counters.items() if isinstance(counters, dict) else ():
            if type(value) is int:
                totals[name] = totals.get(name, 0) + value
    return totals or None


def counter_difference(before: dict[str, int] | None, after: dict[str, int] | None) -> dict[str, int] | None:
    """Growth of every counter; None when a side is missing or a counter fell, as after a restart."""
    if before is None or after is None:
        return None
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    return None if any(value < 0 for value in grown.values()) else grown


def _not_there(error: RequestError) -> bool:
    """Whether a server without SGLang's interface answers like that: no such page, or a page for people."""
    return error.kind == "protocol" or error.status in (404, 405, 501)


def _states(info: dict[str, Any]) -> list[dict[str, Any]]:
    states = info.get("internal_states")
    return [s for s in states if isinstance(s, dict)] if isinstance(states, list) else []


def _positive(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file, or an empty one: the model folder is often on another machine."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _special_ids(config: dict[str, Any], tokenizer: dict[str, Any]) -> set[int]:
    ids: set[int] = set()
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(key)
        ids.update(i for i in (value if isinstance(value, list) else [value]) if type(i) is int)
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and token.get("special") and type(token.get("id")) is int:
            ids.add(token["id"])
    return ids
