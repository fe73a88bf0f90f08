"""Time to first token and inter-token latency as `sglang-dsv4x replay` and SGLang's `bench_serving` measure them.

Both send the same prompts, one at a time, to the same server, whose cache is emptied before each run. The server's own
spread is measured first: runs of bench_serving alone, and how far their medians lie apart. Then both run in turns, each
first every other time, and the medians of their runs must differ by no more than that.

The prompts are text whose tokens are known exactly (bench_serving takes text, replay token ids) and whose first output
token is text too: bench_serving's clock starts at the first text, replay's at the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import requests

from .. import configs
from ..launch import LaunchError, Server
from ..make_model import MakeModelError, make_model
from ..make_model.tokenizer import FIRST_BYTE_ID
from ..replay.client import RequestError, Sampling
from ..replay.conversation import Agent, Conversation, Turn
from ..replay.session import Settings, State, replay
from ..replay.tokens import PromptMaker, Scaling, Vocabulary
from .record import record, write

NAME = "replay-against-bench-serving"
MODEL = "tiny"
BLOCK = 64
TIMEOUT_S = 600.0
# Ids below this are the special tokens and the bytes of ASCII, which any text of them encodes to again.
TEXT_IDS = FIRST_BYTE_ID + 127


class Medians(NamedTuple):
    """Medians of one run over all its requests, milliseconds, and how many values they are of."""

    ttft_ms: float
    itl_ms: float
    requests: int
    gaps: int


class Failed(RuntimeError):
    """A run did not give what it should; the message says what."""


def main(argv: Sequence[str]) -> int:
    """Runs it and prints a table. Returns 0 when both agree, 1 when not or when a run fails, 130 when interrupted."""
    parser = argparse.ArgumentParser(
        f"sglang-dsv4x bench {NAME}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the result as JSON")
    for flag, default, words in (
        ("--rounds", 5, "runs of each, and of bench_serving alone before (default %(default)s)"),
        ("--prompts", 8, "requests of a run (default %(default)s)"),
        ("--prompt-tokens", 512, "length of each prompt (default %(default)s)"),
        ("--output-tokens", 24, "tokens generated for each (default %(default)s)"),
    ):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=words)
    args = parser.parse_args(argv)
    for name in ("rounds", "prompts", "prompt_tokens", "output_tokens"):
        if getattr(args, name) < 4 - 3 * (name in ("rounds", "prompts")):
            parser.error(f"--{name.replace('_', '-')} is too small")
    if importlib.util.find_spec("datasets") is None:
        print(f"sglang-dsv4x bench {NAME}: bench_serving needs 'pip install datasets'", file=sys.stderr)
        return 1
    try:
        results = measure(args)
    except (MakeModelError, LaunchError, RequestError, Failed, requests.RequestException) as error:
        print(f"sglang-dsv4x bench {NAME}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"sglang-dsv4x bench {NAME}: interrupted", file=sys.stderr)
        return 130
    print(as_table(results))
    if args.json is not None:
        settings = {k: v for k, v in vars(args).items() if k != "json"} | {"model": MODEL}
        write(args.json, record(NAME, argv, settings, results))
    return 0 if all(each["within"] for each in results["compared"].values()) else 1


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Starts a server and measures. Raises LaunchError, Failed, RequestError, requests.RequestException."""
    with tempfile.TemporaryDirectory(prefix="dsv4x-bench-") as name:
        folder = Path(name)
        make_model(configs.load(MODEL), folder / "model", seed=0)
        print("starting the server", flush=True)
        with Server(_server_arguments(args, folder / "model"), folder / "server.log") as server:
            chosen = choose_prompts(server.base_url, args)
            dataset = _write_dataset(folder, chosen, args.prompt_tokens)

            def theirs() -> Medians:
                return run_bench_serving(server.base_url, folder, dataset, args)

            def ours() -> Medians:
                return run_replay(server.base_url, chosen, args)

            # The first run of each warms the server and the page cache, and is not counted.
            theirs(), ours()
            alone = [_told("bench_serving alone", i, theirs()) for i in range(args.rounds)]
            runs: dict[str, list[Medians]] = {"bench_serving": [], "replay": []}
            for i in range(args.rounds):
                order = [("bench_serving", theirs), ("replay", ours)]
                for tool, run in order if i % 2 == 0 else reversed(order):
                    runs[tool].append(_told(tool, i, run()))
    return results_of(alone, runs)


def results_of(alone: Sequence[Medians], runs: dict[str, list[Medians]]) -> dict[str, Any]:
    """Medians of the runs' medians, and whether they differ by no more than the server's own spread."""
    compared = {}
    for field in ("ttft_ms", "itl_ms"):
        own = [getattr(each, field) for each in alone]
        medians = {tool: statistics.median(getattr(r, field) for r in each) for tool, each in runs.items()}
        spread = max(own) - min(own)
        difference = medians["replay"] - medians["bench_serving"]
        compared[field] = {
            **medians,
            "difference": difference,
            "own_spread": spread,
            "within": abs(difference) <= spread,
        }
    return {
        "compared": compared,
        "alone": [each._asdict() for each in alone],
        "runs": {tool: [r._asdict() for r in each] for tool, each in runs.items()},
    }


def choose_prompts(url: str, args: argparse.Namespace) -> list[int]:
    """Numbers of prompts whose first output token is text by itself. Raises Failed when there are too few."""
    chosen: list[int] = []
    for number in range(8 * args.prompts):
        prompt = prompt_ids(number, args.prompt_tokens)
        by_id = _generate(url, {"input_ids": prompt})
        if not by_id["text"].strip() or "\ufffd" in by_id["text"]:
            continue
        if not chosen:
            # The server's tokenizer must make the same ids of the text: then all of it but the last token is a hit.
            by_text = _generate(url, {"text": text_of(prompt)})["meta_info"]
            if by_text["prompt_tokens"] != len(prompt) or by_text["cached_tokens"] == 0:
                raise Failed(f"the prompt's text does not encode to its token ids: {by_text}")
        chosen.append(number)
        if len(chosen) == args.prompts:
            return chosen
    raise Failed(f"only {len(chosen)} of {8 * args.prompts} prompts have text as first output token")


def prompt_ids(number: int, tokens: int) -> list[int]:
    """Token ids of a prompt, as replay makes them for `conversation_of(number)`."""
    conversation = conversation_of(number, tokens, 1)
    maker = PromptMaker(_vocabulary(), Scaling(BLOCK, 1.0), 0, conversation.token_scope)
    turn = conversation.main.steps[0]
    assert isinstance(turn, Turn)
    return [int(i) for i in maker.prompt(turn, 1)]


def conversation_of(number: int, tokens: int, output_tokens: int) -> Conversation:
    """A conversation of one turn, which shares nothing with any other."""
    turn = Turn(tokens, output_tokens, tuple(range(tokens // BLOCK)))
    return Conversation(f"prompt {number}", BLOCK, f"prompt {number}", Agent("main", (turn,)))


def text_of(ids: Sequence[int]) -> str:
    """The text that the tiny model's byte-level tokenizer encodes to these ids."""
    return bytes(i - FIRST_BYTE_ID for i in ids).decode("ascii")


def run_replay(url: str, chosen: Sequence[int], args: argparse.Namespace) -> Medians:
    """One run of replay. Raises Failed for a turn without an answer."""
    state = State()
    settings = Settings(vocab_size=TEXT_IDS, flush_cache=True, sampling=Sampling(), timeout_s=TIMEOUT_S)
    conversations = [conversation_of(n, args.prompt_tokens, args.output_tokens) for n in chosen]
    asyncio.run(replay(url, conversations, settings, state, _Silent()))
    assert state.run is not None
    done = [r.completion for r in state.run.records if r.completion is not None]
    if len(done) < len(chosen):
        raise Failed(f"replay: {len(chosen) - len(done)} of {len(chosen)} turns failed")
    for number, each in zip(chosen, state.run.records, strict=True):
        ids = np.asarray(prompt_ids(number, args.prompt_tokens), "<i8")
        if each.prompt_digest != hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest():
            raise Failed(f"replay sent another prompt {number} than bench_serving")
    return _medians([c.ttft_s for c in done], [gap for c in done for gap in c.gaps_s])


def run_bench_serving(url: str, folder: Path, dataset: Path, args: argparse.Namespace) -> Medians:
    """One run of `python -m sglang.bench_serving`. Raises Failed with its output when it is not what was asked for."""
    out = folder / "bench_serving.jsonl"
    out.unlink(missing_ok=True)
    model = str(folder / "model")
    options = {
        "--backend": "sglang",
        "--base-url": url,
        "--model": model,
        "--tokenizer": model,
        "--dataset-name": "custom",
        "--dataset-path": dataset,
        "--num-prompts": args.prompts,
        "--sharegpt-output-len": args.output_tokens,
        "--max-concurrency": 1,
        "--warmup-requests": 0,
        "--output-file": out,
    }
    words = [str(word) for pair in options.items() for word in pair]
    command = [sys.executable, "-m", "sglang.bench_serving", *words]
    command += ["--flush-cache", "--output-details", "--disable-tqdm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode or not out.exists():
        raise Failed(
            f"bench_serving ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    value = json.loads(out.read_text("utf-8").splitlines()[-1])
    if value["completed"] != args.prompts or set(value["input_lens"]) != {args.prompt_tokens}:
        raise Failed(
            f"bench_serving completed {value['completed']} prompts of {set(value['input_lens'])} tokens"
        )
    return _medians(value["ttfts"], [gap for gaps in value["itls"] for gap in gaps])


def as_table(results: dict[str, Any]) -> str:
    """The closing table."""
    lines = [
        "",
        f"{'median of runs, ms':20}{'bench_serving':>15}{'replay':>10}{'difference':>12}{'own spread':>12}",
    ]
    for field, each in results["compared"].items():
        verdict = "within" if each["within"] else "OUTSIDE"
        lines.append(
            f"{field.removesuffix('_ms').upper():20}{each['bench_serving']:15.2f}{each['replay']:10.2f}"
            f"{each['difference']:12.2f}{each['own_spread']:12.2f}  {verdict}"
        )
    return "\n".join(lines)


class _Silent:
    def begin(self, *_: object) -> None: ...

    def turn(self, record: object) -> None: ...


def _vocabulary() -> Vocabulary:
    return Vocabulary(TEXT_IDS, range(FIRST_BYTE_ID))


def _medians(ttfts: Sequence[float], gaps: Sequence[float]) -> Medians:
    return Medians(1000 * statistics.median(ttfts), 1000 * statistics.median(gaps), len(ttfts), len(gaps))


def _told(tool: str, number: int, seen: Medians) -> Medians:
    print(f"{tool}, run {number + 1}: TTFT {seen.ttft_ms:.1f} ms, ITL {seen.itl_ms:.2f} ms", flush=True)
    return seen


def _generate(url: str, body: dict[str, Any]) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    reply = requests.post(f"{url}/generate", json={**body, "sampling_params": sampling}, timeout=TIMEOUT_S)
    reply.raise_for_status()
    value: dict[str, Any] = reply.json()
    return value


def _write_dataset(folder: Path, chosen: Sequence[int], tokens: int) -> Path:
    """The prompts as bench_serving's `custom` data set; it wants an answer to each, and uses its length for nothing."""
    path = folder / "prompts.jsonl"
    lines = [
        {"conversations": [{"content": text_of(prompt_ids(n, tokens))}, {"content": "any answer"}]}
        for n in chosen
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def _server_arguments(args: argparse.Namespace, model: Path) -> list[str]:
    """Arguments of `launch_server`: room for every prompt, no tier, so that only the server's path is timed."""
    pages = 8 * args.prompts * (args.prompt_tokens // 256 + 2) + 8
    return [
        *("--model-path", str(model), "--device", "cpu", "--skip-server-warmup"),
        *("--max-total-tokens", str(pages * 256), "--swa-full-tokens-ratio", "0.5"),
        *("--max-running-requests", "1", "--chunked-prefill-size", "256"),
        *("--enable-dsv4x", "--dsv4x-tier", "off"),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
