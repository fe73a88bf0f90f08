"""The compressor: C4 entries from eight tokens, C128 entries from 128, and the state kept between chunks.

Paper (arXiv 2606.19348) on CSA and HCA; DeepSeek's released `inference/model.py` (Compressor). Entry i of C4
pools tokens 4i-4 .. 4i-1 through their Ca columns and 4i .. 4i+3 through their Cb columns, per channel by
softmax of score + APE; entry 0 has only its own four. C128 pools 128 tokens. It is normed, and roped at the
START of its block.

kv_score and state rows, fp32 (state also bf16): C4 |kv Ca|kv Cb|score Ca|score Cb|, C128 |kv|score|; scores
raw, APE added at compress time. State placement is SGLang's (sglang 0.5.17 `c_plan.cuh`): C4 rings ride on
SWA pages, C128 rings on request slots.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from .layouts import ROPE_DIM
from .norm_rope import rope
from .numerics import rms_scale, tree_sum
from .registry import register


class CompressionPlan(NamedTuple):
    """Which rows make which entries and which are kept as state, in one step, for all layers of a ratio.

    M entries complete in this step, each from a window of W = 8 (C4) or 128 (C128) tokens; slot = entry * W +
    place in the window. "Lines" are rows of width d: row r of kv_score or state is the lines r * 2 coff .. of
    its columns.
    """

    ratio: int
    tokens: torch.Tensor  # i64 [M], ragged index of the token that completes the entry
    positions: torch.Tensor  # i64 [M], position of the block's first token
    kv_lines: (
        torch.Tensor
    )  # i64 [M * W], line of kv_score; slots that are not of this chunk hold any valid line
    state_slots: torch.Tensor  # i64 [S], slots whose token came before this chunk
    state_lines: torch.Tensor  # i64 [S], line of the state for each of them
    absent_slots: torch.Tensor  # i64 [A], slots before position 0
    write_tokens: torch.Tensor  # i64 [K], ragged index of the tokens to keep
    write_rows: torch.Tensor  # i64 [K], their state rows, all different


class CompressedEntries(NamedTuple):
    """Entries in the order of the tokens that completed them."""

    entries: torch.Tensor  # fp32 [M, d], normed and roped
    tokens: torch.Tensor  # i64 [M], ragged index of the completing token


def overlap_factor(ratio: int) -> int:
    """Windows are `ratio` times this long: 2 for C4 (overlap), 1 for C128. ValueError for another ratio."""
    if ratio == 4:
        return 2
    if ratio == 128:
        return 1
    raise ValueError(f"compress ratio {ratio} is not 4 or 128")


@register("plan_compression", "torch")
def plan_compression(
    *,
    ratio: Literal[4, 128],
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_swa: torch.Tensor,
    swa_page_size: int,
    ring_size: int,
) -> CompressionPlan:
    """Plans one step (prefill, extend or decode), without a loop over tokens or requests.

    Kept as state: for C4, of every SWA page that the extend touches, its last `ring_size` positions up to the
    end of the extend or of the page, since a later prefix hit resumes at a page end; for C128, the positions
    of the unfinished block, and always the last one.

    Args:
        ratio: 4 or 128.
        seq_lens: int [B], tokens after this step.
        extend_lens: int [B], tokens of this step (1 in decode).
        req_pool_indices: int [B], rows of `req_to_token`.
        req_to_token: int [R, S], full (logical) location of every position.
        full_to_swa: int64, SWA location of every full location; offsets in a page are those of positions.
        swa_page_size: tokens of an SWA page; a multiple of ring_size.
        ring_size: state rows per SWA page (C4, at least 8) or per request slot (C128, at least 128).
    Raises: ValueError for another ratio or a ring that is too small.
    """
    overlap = overlap_factor(ratio)
    window = ratio * overlap
    if ring_size < window or (ratio == 4 and swa_page_size % ring_size):
        raise ValueError(
            f"C{ratio} needs a state ring of at least {window} rows that divides the SWA page "
            f"of {swa_page_size} tokens, not {ring_size}"
        )
    columns = 2 * overlap
    device = seq_lens.device
    ends, extend, slots_of = seq_lens.long(), extend_lens.long(), req_pool_indices.long()
    prefix = ends - extend
    request = torch.repeat_interleave(extend)
    ragged = torch.arange(request.shape[0], device=device)
    position = ragged + (prefix - extend.cumsum(0) + extend)[request]

    def state_rows(of_request: torch.Tensor, of_position: torch.Tensor) -> torch.Tensor:
        slot = slots_of[of_request]
        if ratio == 128:
            return slot * ring_size + of_position % ring_size
        swa = full_to_swa[req_to_token[slot, of_position].long()].long()
        return swa // swa_page_size * ring_size + swa % ring_size

    tokens = ((position + 1) % ratio == 0).nonzero().squeeze(1)
    owner = request[tokens]
    last = position[tokens]
    place = torch.arange(window, device=device)
    half = place // ratio if overlap == 2 else torch.zeros_like(place)
    window_position = last.unsqueeze(1) + (place - (window - 1))
    absent = window_position < 0
    earlier = (window_position < prefix[owner].unsqueeze(1)) & ~absent
    kv_lines = (tokens.unsqueeze(1) + (place - (window - 1))).clamp_min_(0) * columns + half
    state_slots = earlier.flatten().nonzero().squeeze(1)
    state_lines = (
        state_rows(owner[state_slots // window], window_position.flatten()[state_slots]) * columns
        + half[state_slots % window]
    )

    if ratio == 4:
        page_end = (position // swa_page_size + 1) * swa_page_size
        kept = position >= torch.minimum(page_end, ends[request]) - ring_size
    else:
        block = ends // ratio * ratio
        kept = position >= torch.minimum(block, ends - 1)[request]
    write_tokens = kept.nonzero().squeeze(1)
    return CompressionPlan(
        ratio=ratio,
        tokens=tokens,
        positions=last + 1 - ratio,
        kv_lines=kv_lines.flatten(),
        state_slots=state_slots,
        state_lines=state_lines,
        absent_slots=absent.flatten().nonzero().squeeze(1),
        write_tokens=write_tokens,
        write_rows=state_rows(request[write_tokens], position[write_tokens]),
    )


@register("compress", "torch")
def compress(
    kv_score: torch.Tensor,
    state: torch.Tensor,
    ape: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    freqs_cis: torch.Tensor,
    plan: CompressionPlan,
) -> CompressedEntries:
    """Entries that this step completes. Reads `state` as the previous step left it: run before `write_state`.

    The bits of an entry depend on its own window only, however the prompt was cut into chunks (with fp32
    state).

    Args:
        kv_score: fp32 [T, 2 coff d], this step's tokens.
        state: fp32 or bf16 [rows, 2 coff d], contiguous.
        ape: fp32 [W, d]; C4: rows 0-3 for the Ca half, 4-7 for the Cb half.
        norm_weight: float [d].
        eps: of the RMS norm.
        freqs_cis: complex64 [S, 32].
        plan: of this step and ratio.
    """
    window, dim = ape.shape
    count = plan.tokens.shape[0]
    overlap = overlap_factor(plan.ratio)
    if window != plan.ratio * overlap or kv_score.shape[1] != 2 * overlap * dim:
        raise ValueError(
            f"C{plan.ratio} takes ape [{plan.ratio * overlap}, d] and kv_score [T, {2 * overlap} d], "
            f"not {list(ape.shape)} and {list(kv_score.shape)}"
        )
    if count == 0:
        return CompressedEntries(kv_score.new_empty((0, dim), dtype=torch.float32), plan.tokens)
    lines = kv_score.reshape(-1, dim)
    kv = lines.index_select(0, plan.kv_lines)
    score = lines.index_select(0, plan.kv_lines + overlap)
    if plan.state_slots.shape[0]:
        kept = state.view(-1, dim)
        kv.index_copy_(0, plan.state_slots, kept.index_select(0, plan.state_lines).to(kv.dtype))
        score.index_copy_(0, plan.state_slots, kept.index_select(0, plan.state_lines + overlap).to(kv.dtype))
    kv.index_fill_(0, plan.absent_slots, 0.0)
    score.index_fill_(0, plan.absent_slots, float("-inf"))

    score = score.view(count, window, dim).add_(ape)
    weight = score.sub_(score.amax(1, keepdim=True)).exp_()
    entry = tree_sum(kv.view(count, window, dim).mul_(weight), 1).div_(tree_sum(weight, 1))
    entry = entry.mul_(rms_scale(entry, eps)).mul_(norm_weight.to(torch.float32))
    entry[:, -ROPE_DIM:] = rope(entry[:, -ROPE_DIM:], freqs_cis, plan.positions)
    return CompressedEntries(entry, plan.tokens)


@register("write_state", "torch")
def write_state(state: torch.Tensor, kv_score: torch.Tensor, plan: CompressionPlan) -> None:
    """Keeps the rows that later steps need; run after `compress` of the same step.

    Args:
        state: fp32 or bf16 [rows, 2 coff d]; modified.
        kv_score: fp32 [T, 2 coff d].
        plan: of this step and ratio.
    """
    state.index_copy_(0, plan.write_rows, kv_score.index_select(0, plan.write_tokens).to(state.dtype))
