"""Resume points: what comes back is what went out, the least valuable goes first, nothing is lost or owned twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_dsv4x.hicache.errors import HostMemoryError
from sglang_dsv4x.hicache.host_memory import HostMemory
from sglang_dsv4x.hicache.resume_points import PointKind, ResumePoints

PAGES = 6


def pages(width: int) -> torch.Tensor:
    return torch.randint(0, 255, (PAGES, width), dtype=torch.uint8)


def page(number: int) -> torch.Tensor:
    return torch.tensor([number])


def points(capacity: int, *pieces: torch.Tensor) -> ResumePoints:
    return ResumePoints(pieces or (pages(8),), capacity)


def test_a_restored_page_has_the_saved_bytes_whatever_happened_to_the_device_since() -> None:
    whole = pages(32)
    pieces = (whole[:, 4:12], whole[:, 20:30], pages(16))
    made = points(2, *pieces)
    saved = [piece[3].clone() for piece in pieces]
    assert made.save(7, page(3), PointKind.END)
    for piece in pieces:
        piece.fill_(0)
    made.restore(7, page(5))
    for piece, expected in zip(pieces, saved, strict=True):
        assert torch.equal(piece[5], expected)
        assert not piece[:5].any(), "another page was written"


def test_what_a_point_does_not_hold_is_poisoned_in_the_restored_page_only() -> None:
    whole = pages(16)
    before = whole.clone()
    made = ResumePoints([whole[:, 8:]], 1, poisoned=[whole[:, :8]])
    made.save(1, page(0), PointKind.END)
    made.restore(1, page(2))
    assert (whole[2, :8] == 0xFF).all()
    assert torch.equal(whole[2, 8:], before[0, 8:])
    assert torch.equal(whole[[0, 1, 3, 4, 5]], before[[0, 1, 3, 4, 5]])


def test_the_least_recently_used_point_of_the_lowest_kind_makes_room() -> None:
    made = points(3)
    for owner, kind in ((1, PointKind.END), (2, PointKind.INTERVAL), (3, PointKind.INTERVAL)):
        made.save(owner, page(0), kind)
    made.touch(2)
    made.save(4, page(0), PointKind.FORK)
    assert [owner in made for owner in (1, 2, 3, 4)] == [True, True, False, True]
    made.save(5, page(0), PointKind.END)
    assert 2 not in made
    assert made.save(6, page(0), PointKind.END) and 4 not in made, "a fork makes room for an end"
    assert not made.save(7, page(0), PointKind.INTERVAL) and 7 not in made, (
        "an end makes no room for an interval"
    )


def test_saving_again_raises_the_kind_and_copies_nothing() -> None:
    piece = pages(8)
    made = points(2, piece)
    first = piece[0].clone()
    made.save(1, page(0), PointKind.INTERVAL)
    piece[0] = 0
    made.save(1, page(0), PointKind.END)
    made.save(2, page(1), PointKind.INTERVAL)
    made.save(3, page(1), PointKind.INTERVAL)
    assert 1 in made, "it is an end now"
    made.restore(1, page(4))
    assert torch.equal(piece[4], first)
    assert made.counters().written == 3


def test_without_capacity_nothing_is_saved_and_no_memory_is_taken() -> None:
    made = points(0)
    assert not made.save(1, page(0), PointKind.END)
    assert made.host_bytes == 0 and len(made) == 0
    made.check_integrity()


def test_an_unknown_owner_is_an_error_on_restore_and_nothing_on_release() -> None:
    made = points(1)
    with pytest.raises(KeyError):
        made.restore(9, page(0))
    made.release(9)
    assert made.counters().released == 0


def test_more_memory_than_there_is_names_the_flag() -> None:
    with pytest.raises(HostMemoryError, match="--dsv4x-resume-memory-gb"):
        ResumePoints([pages(8)], 1 << 20, memory=HostMemory(1 << 20, 1 << 20, None, None))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 4),
    st.lists(
        st.tuples(
            st.sampled_from(["save", "release", "touch", "restore", "reset"]),
            st.integers(0, 7),
            st.integers(0, PAGES - 1),
            st.sampled_from(list(PointKind)),
        ),
        max_size=40,
    ),
)
def test_any_order_of_calls_keeps_every_slot_owned_once_and_every_owner_its_bytes(
    capacity: int, calls: list[tuple[str, int, int, PointKind]]
) -> None:
    piece = pages(8)
    made = points(capacity, piece)
    expected: dict[int, torch.Tensor] = {}
    for call, owner, number, kind in calls:
        if call == "save":
            known = owner in made
            if made.save(owner, page(number), kind) and not known:
                expected[owner] = piece[number].clone()
        elif call == "release":
            made.release(owner)
        elif call == "touch":
            made.touch(owner)
        elif call == "reset":
            made.reset()
        elif owner in made:
            made.restore(owner, page(number))
            assert torch.equal(piece[number], expected[owner])
        made.check_integrity()
        assert len(made) <= capacity
