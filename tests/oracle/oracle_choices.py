"""The discrete choices of a DeepSeek-V4 in transformers: C4 entries that indexers select, experts that routers select.

Forward hooks record the scores behind each choice, and force single choices the other way. Nothing is replaced in the
model, so what runs is transformers' own code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from transformers import DeepseekV4ForCausalLM
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling


class Tie(NamedTuple):
    """A choice at the boundary of a top-k."""

    layer: int
    kind: Literal["index", "router"]
    position: int
    chosen: int
    """C4 entry or expert inside the boundary."""
    other: int
    """The one outside it."""
    gap: float
    """Score of `chosen` minus that of `other`, relative to the root mean square of the scores at this position."""


class Boundary(NamedTuple):
    """Scores of one choice in one layer and chunk: everything outside the visible range is -inf."""

    layer: int
    kind: Literal["index", "router"]
    scores: torch.Tensor
    k: int

    def scale(self) -> torch.Tensor:
        finite = self.scores.isfinite()
        squares = torch.where(finite, self.scores, 0.0).square().sum(-1)
        return (squares / finite.sum(-1).clamp_min(1)).sqrt().clamp_min(1e-30)

    def gaps(self) -> torch.Tensor:
        """[tokens]: relative gap between ranks k and k + 1, inf where there is no rank k + 1."""
        if self.scores.shape[-1] <= self.k:
            return torch.full((self.scores.shape[0],), math.inf)
        top = self.scores.topk(self.k + 1, dim=-1).values
        gap = (top[:, -2] - top[:, -1]) / self.scale()
        return torch.where(top[:, -1].isfinite(), gap, math.inf)

    def ties(self, tolerance: float, start: int) -> Iterator[Tie]:
        for token in (self.gaps() < tolerance).nonzero().flatten().tolist():
            scores, scale = self.scores[token], float(self.scale()[token])
            order = scores.argsort(descending=True)
            inside, outside = order[: self.k].flip(0).tolist(), order[self.k :].tolist()
            for chosen in inside:
                for other in outside:
                    gap = (float(scores[chosen]) - float(scores[other])) / scale
                    if not gap < tolerance:
                        break
                    yield Tie(self.layer, self.kind, start + token, chosen, other, gap)
                if not (float(scores[chosen]) - float(scores[outside[0]])) / scale < tolerance:
                    break


class RecordedChoices:
    """The choices of one forward pass over the tokens from `start` on."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.boundaries: list[Boundary] = []

    def gaps(self, kind: str) -> dict[int, torch.Tensor]:
        """Per layer [tokens]: relative gap between ranks k and k + 1."""
        return {boundary.layer: boundary.gaps() for boundary in self.boundaries if boundary.kind == kind}

    def ties(self, tolerance: float) -> list[Tie]:
        return [tie for boundary in self.boundaries for tie in boundary.ties(tolerance, self.start)]


class ChoiceHooks:
    """Hooks that record every top-k of a model, and force ties the other way."""

    def __init__(self, model: DeepseekV4ForCausalLM) -> None:
        self._recorded: RecordedChoices | None = None
        self._forced: list[Tie] = []
        for number, layer in enumerate(model.model.layers):
            compressor = layer.self_attn.compressor
            if isinstance(compressor, modeling.DeepseekV4CSACompressor):
                compressor.indexer.scorer.register_forward_hook(self._score_hook(number, compressor.indexer))
                compressor.indexer.register_forward_hook(self._selection_hook(number))
            if isinstance(layer.mlp.gate, modeling.DeepseekV4TopKRouter):
                layer.mlp.gate.register_forward_hook(self._router_hook(number))

    @contextmanager
    def recorded(self, start: int, forced: Sequence[Tie]) -> Iterator[RecordedChoices]:
        self._recorded, self._forced = RecordedChoices(start), list(forced)
        try:
            yield self._recorded
        finally:
            self._recorded, self._forced = None, []

    def _score_hook(self, layer: int, indexer: modeling.DeepseekV4Indexer) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], scores: torch.Tensor) -> None:
            if self._recorded is not None:
                tokens, entries = scores.shape[1:]
                visible = (torch.arange(tokens) + self._recorded.start + 1) // indexer.compress_rate
                hidden = torch.arange(entries) >= visible[:, None]
                masked = scores[0].masked_fill(hidden, -math.inf)
                self._recorded.boundaries.append(Boundary(layer, "index", masked, indexer.index_topk))

        return hook

    def _selection_hook(self, layer: int) -> Callable[..., torch.Tensor]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], selected: torch.Tensor) -> torch.Tensor:
            for token, tie in self._here(layer, "index", selected.shape[1]):
                row = selected[0, token]
                selected[0, token] = torch.where(row == tie.chosen, tie.other, row)
            return selected

        return hook

    def _router_hook(self, layer: int) -> Callable[..., tuple[torch.Tensor, ...]]:
        def hook(
            router: modeling.DeepseekV4TopKRouter, args: tuple[Any, ...], output: tuple[torch.Tensor, ...]
        ) -> tuple[torch.Tensor, ...]:
            logits, weights, experts = output
            scores = router.score_fn(logits)
            if self._recorded is not None:
                biased = scores + router.e_score_correction_bias
                self._recorded.boundaries.append(Boundary(layer, "router", biased, router.top_k))
            for token, tie in self._here(layer, "router", experts.shape[0]):
                experts[token] = torch.where(experts[token] == tie.chosen, tie.other, experts[token])
                chosen = scores[token].gather(0, experts[token])
                weights[token] = chosen / (chosen.sum() + 1e-20) * router.routed_scaling_factor
            return logits, weights, experts

        return hook

    def _here(self, layer: int, kind: str, tokens: int) -> Iterator[tuple[int, Tie]]:
        if self._recorded is None:
            return
        for tie in self._forced:
            token = tie.position - self._recorded.start
            if tie.layer == layer and tie.kind == kind and 0 <= token < tokens:
                yield token, tie
