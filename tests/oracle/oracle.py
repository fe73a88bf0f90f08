"""transformers as the numerical oracle of a DeepSeek-V4 server.

Loads a checkpoint in float32 (the stored values, upcast) with eager attention and gives teacher-forced
log-probabilities of any token sequence. Attention, compressors, indexer, hyper-connections and experts are
transformers' own code. It has no Hadamard rotation and no index quantisation: the rotation is orthogonal, so a server
that keeps its index keys in float32 has the same scores.

Two implementations that differ only in the order of float32 sums agree to about 1e-6 until a **near-tie**: two
entries at the top-k boundary of an indexer, or two experts at that of a router, which the last bits of their scores
decide. From there on they differ visibly, and rightly so. `Oracle.explain` tells such a difference from a fault: it
follows the observed log-probabilities, and where they leave the oracle it accepts nothing but the other side of a
near-tie, after which that position and every later one has to agree again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from oracle_choices import ChoiceHooks, RecordedChoices, Tie
from transformers import AttentionInterface, AttentionMaskInterface, DeepseekV4ForCausalLM, DynamicCache
from transformers.masking_utils import eager_mask
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

CHUNK = 256
"""Tokens per forward pass where the caller has no wish; the cost of attention grows with its square."""

TOLERANCE = 1e-4
"""Relative error of a log-probability that counts as equal; below 1 nat it is the absolute error."""

TIE = 2e-5
"""Relative gap at a boundary below which sums in another order may choose otherwise. Between chunk sizes of the oracle
itself, choices flipped at gaps up to 5e-6."""

_FP8_ROWS = "eager_fp8_rows"
_NOPE, _GROUP = 448, 64


class Run(NamedTuple):
    """One teacher-forced pass over T tokens."""

    logits: torch.Tensor
    """[T, vocab] float32."""
    log_probabilities: torch.Tensor
    """[T - 1] float32: of token t + 1 after tokens 0..t."""
    index_gaps: dict[int, torch.Tensor]
    """Per C4 layer [T]: relative gap between ranks k and k + 1; inf where all entries are taken."""
    router_gaps: dict[int, torch.Tensor]
    """Per layer with a learned router [T]: the same for experts."""
    choices: list[RecordedChoices]
    """Scores behind the choices, per chunk."""

    def ties(self, tolerance: float = TIE) -> list[Tie]:
        """All pairs across a boundary with a relative gap below `tolerance`."""
        return [tie for choices in self.choices for tie in choices.ties(tolerance)]


class Explanation(NamedTuple):
    """How an observed sequence agrees with the oracle."""

    flips: list[Tie]
    """Near-ties that the observed side decided otherwise, in order of position, `forced` ones included."""
    worst: float
    """Largest relative error left, over all observed positions."""
    worst_position: int


class UnexplainedDifference(AssertionError):
    """Observed log-probabilities leave the oracle where no near-tie explains it."""


class Oracle:
    """A checkpoint in transformers, float32. Not safe for concurrent use."""

    def __init__(self, checkpoint: Path | str, *, fp8_rows: bool = False) -> None:
        """`fp8_rows`: every KV row that attention reads is rounded as a stored one is (`round_rows_to_fp8`).

        Raises ValueError when the checkpoint's tensors are not exactly the model's.
        """
        attention = "eager"
        if fp8_rows:
            attention = _FP8_ROWS
            AttentionInterface.register(_FP8_ROWS, _attend_fp8_rows)
            AttentionMaskInterface.register(_FP8_ROWS, eager_mask)
        self.model, loading = DeepseekV4ForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation=attention, output_loading_info=True
        )
        wrong = {name: found for name, found in loading.items() if found}
        if wrong:
            raise ValueError(f"{checkpoint} does not hold exactly this model's tensors: {wrong}")
        self.model.eval()
        self._hooks = ChoiceHooks(self.model)

    def run(
        self, ids: Sequence[int], *, chunk: int | Sequence[int] | None = CHUNK, forced: Iterable[Tie] = ()
    ) -> Run:
        """Logits and margins of `ids`, with `forced` ties decided otherwise.

        Tokens are fed in chunks of one size, of the given sizes, or (None) in one pass. Raises ValueError when sizes
        do not add up to the tokens.
        """
        sizes = _sizes(len(ids), chunk)
        ties, cache, steps, start = list(forced), self._new_cache(), [], 0
        for size in sizes:
            steps.append(self._step(ids[start : start + size], start, cache, ties))
            start += size
        logits = torch.cat([step.logits for step in steps])
        return Run(
            logits=logits,
            log_probabilities=_log_probabilities(logits, ids),
            index_gaps=_joined([step.choices.gaps("index") for step in steps]),
            router_gaps=_joined([step.choices.gaps("router") for step in steps]),
            choices=[step.choices for step in steps],
        )

    def explain(
        self,
        ids: Sequence[int],
        observed: torch.Tensor,
        *,
        chunk: int = CHUNK,
        forced: Iterable[Tie] = (),
        tolerance: float = TOLERANCE,
        tie: float = TIE,
    ) -> Explanation:
        """Holds `observed` [T - 1], log-probabilities of ids[1:] from elsewhere, NaN where unknown, against the oracle.

        `forced`: flips that were found when a prefix of `ids` was computed, for a prefix that is unknown now. Raises
        UnexplainedDifference, naming the position and the gaps there, when a position differs by more than
        `tolerance` and deciding no tie of a relative gap below `tie` otherwise makes it agree.
        """
        if len(observed) != len(ids) - 1:
            raise ValueError(f"{len(ids)} tokens have {len(ids) - 1} log-probabilities, not {len(observed)}")
        flips, cache, errors = list(forced), self._new_cache(), []
        for start in range(0, len(ids), chunk):
            part = _Part(ids[start : start + chunk + 1], start, chunk, observed[start : start + chunk], cache)
            best = self._attempt(part, flips)
            while (bad := best.first_beyond(tolerance)) is not None:
                flips.append(self._flip(part, flips, best, bad, tolerance, tie))
                best = self._attempt(part, flips)
            cache = best.cache
            errors.append(best.errors)
        joined = torch.cat(errors)
        worst = int(joined.argmax())
        return Explanation(sorted(flips, key=lambda flip: flip.position), float(joined[worst]), worst)

    def _flip(
        self, part: _Part, flips: list[Tie], best: _Attempt, bad: int, tolerance: float, tie: float
    ) -> Tie:
        """The tie whose other side makes token `bad` of the part agree, the nearest position first: a flip may be too
        small to show in its own token, or that token unknown."""
        candidates = [found for found in best.choices.ties(tie) if found.position <= part.start + bad]
        candidates.sort(key=lambda found: (-found.position, found.gap))
        for candidate in candidates:
            first = self._attempt(part, [*flips, candidate]).first_beyond(tolerance)
            if first is None or first > bad:
                return candidate
        gaps = [
            f"{kind} layer {layer} {float(gap[bad]):.1e}"
            for kind in ("index", "router")
            for layer, gap in best.choices.gaps(kind).items()
        ]
        raise UnexplainedDifference(
            f"position {part.start + bad}: log-probability {float(part.observed[bad]):.6f}, oracle "
            f"{float(best.expected[bad]):.6f}, relative error {float(best.errors[bad]):.2e}, and no near-tie explains "
            f"it. Relative gaps here: {', '.join(gaps)}. Flips before: {flips}"
        )

    def _attempt(self, part: _Part, ties: Sequence[Tie]) -> _Attempt:
        cache = copy.deepcopy(part.cache)
        step = self._step(part.ids[: part.chunk], part.start, cache, ties)
        expected = _log_probabilities(step.logits, part.ids)
        error = (part.observed - expected).abs() / expected.abs().clamp_min(1.0)
        return _Attempt(step.choices, cache, expected, torch.where(part.observed.isnan(), 0.0, error))

    @torch.no_grad()
    def _step(self, ids: Sequence[int], start: int, cache: DynamicCache, forced: Sequence[Tie]) -> _Step:
        with self._hooks.recorded(start, forced) as choices:
            output = self.model(input_ids=torch.tensor([list(ids)]), past_key_values=cache, use_cache=True)
        return _Step(output.logits[0].float(), choices)

    def _new_cache(self) -> DynamicCache:
        """Passed in by every caller: transformers 5.12 returns None instead of a cache that it made itself."""
        return DynamicCache(config=self.model.config)


def margin_report(run: Run, positions: Iterable[int]) -> str:
    """One line per position: the smallest index gap and the smallest router gap there, with their layers."""
    lines = []
    for position in positions:
        parts = []
        for kind, gaps in (("index", run.index_gaps), ("router", run.router_gaps)):
            if gaps:
                gap, layer = min((float(gap[position]), layer) for layer, gap in gaps.items())
                parts.append(f"{kind} {gap:.1e} in layer {layer}")
        lines.append(f"position {position}: {', '.join(parts)}")
    return "\n".join(lines)


def round_rows_to_fp8(rows: torch.Tensor) -> torch.Tensor:
    """KV rows [..., 512] as they come back from storage: 448 values in FP8 e4m3, one scale 2^ceil(log2(max(amax, 1e-4)
    / 448)) per 64 of them (`act_quant` of DeepSeek's reference), and 64 rotary values in bfloat16."""
    groups = rows[..., :_NOPE].float().unflatten(-1, (-1, _GROUP))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448)))
    nope = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    rotary = rows[..., _NOPE:].bfloat16().float()
    return torch.cat([nope.flatten(-2), rotary], dim=-1).to(rows.dtype)


def _attend_fp8_rows(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = round_rows_to_fp8(key)
    return modeling.eager_attention_forward(module, query, rows, rows, attention_mask, **kwargs)


class _Step(NamedTuple):
    logits: torch.Tensor
    choices: RecordedChoices


class _Part(NamedTuple):
    """One chunk of a sequence that is being explained, and the token after it."""

    ids: Sequence[int]
    start: int
    chunk: int
    observed: torch.Tensor
    cache: DynamicCache
    """As it is before the chunk."""


class _Attempt(NamedTuple):
    """A part with some ties forced."""

    choices: RecordedChoices
    cache: DynamicCache
    expected: torch.Tensor
    errors: torch.Tensor

    def first_beyond(self, tolerance: float) -> int | None:
        beyond = (self.errors > tolerance).nonzero().flatten()
        return int(beyond[0]) if len(beyond) else None


def _sizes(tokens: int, chunk: int | Sequence[int] | None) -> list[int]:
    if chunk is None:
        return [tokens]
    if isinstance(chunk, int):
        return [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
    if sum(chunk) != tokens:
        raise ValueError(f"chunks add up to {sum(chunk)} tokens, not {tokens}")
    return list(chunk)


def _log_probabilities(logits: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    """Of ids[1:], from the logits after each token; the last token's have no target where ids end with it."""
    targets = torch.tensor(list(ids[1:]), dtype=torch.long)
    return logits[: len(targets)].log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def _joined(parts: Sequence[dict[int, torch.Tensor]]) -> dict[int, torch.Tensor]:
    return {layer: torch.cat([part[layer] for part in parts]) for layer in parts[0]}
