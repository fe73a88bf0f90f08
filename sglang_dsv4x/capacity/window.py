"""How many SWA tokens a server needs: by its requests and chunk, not by a share of its length.

What SGLang 0.5.17 keeps (`srt/mem_cache/common.py: free_swa_out_of_window_slots`): a decoding request frees SWA pages
behind max(window, page) = 256 tokens, and does so every 128 steps (SGLANG_SWA_EVICTION_INTERVAL), so that it holds at
most 256 + 255 + 128 + 1 tokens, three pages. A prefix that the radix tree keeps can be hit while the page that ends at
its boundary is there: its tail.
"""

from __future__ import annotations

from .byte_model import PAGE

PAGES_PER_RUNNING_REQUEST = 3
PAGES_PER_TAIL = 1


def smallest_window_tokens(chunk_tokens: int, page: int = PAGE) -> int:
    """SWA tokens with which one request always makes progress, whatever the radix tree holds.

    A chunk's new pages and the page that a chunk may begin in, the window before it, which stays locked (a page,
    or two where it straddles a boundary), and the page that decode is about to open.
    """
    return (-(-chunk_tokens // page) + 1 + 2 + 1) * page


def needed_window_tokens(chunk_tokens: int, requests: int, tails: int, page: int = PAGE) -> int:
    """SWA tokens with which `requests` run, one of them in prefill, and `tails` prefixes stay ready for a hit."""
    others = max(0, requests - 1) * PAGES_PER_RUNNING_REQUEST
    return smallest_window_tokens(chunk_tokens, page) + (others + tails * PAGES_PER_TAIL) * page
