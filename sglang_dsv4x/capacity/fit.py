"""How much fits: the most requests of one length, and the most tokens, with the first limit that binds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from .byte_model import PAGE, Settings, Sizes, objects, total
from .errors import PlanError
from .shape import CacheShape
from .window import needed_window_tokens, smallest_window_tokens

DEVICE, HOST = "device memory", "host memory"
HOT = "hot entries (--hot-entries)"
RUNNING = "running requests (--max-running-requests)"
MOST_REQUESTS = 1 << 20


class Budget(NamedTuple):
    """Bytes of one rank; None: not limited."""

    device: int
    host: int | None


class Fit(NamedTuple):
    """What fits, and what keeps more from fitting."""

    requests: int
    """Running at once."""
    tokens: int
    limit: str


@dataclass(frozen=True)
class Fitter:
    """The question asked of one model, one group of settings and one rank's bytes."""

    shape: CacheShape
    settings: Settings
    budget: Budget
    window_share: float | None = None
    """--swa-full-tokens-ratio, where the user gave it; None: the SWA pool is sized by need."""

    def needed_window(self, requests: int) -> int:
        """SWA tokens that the requests, a chunk, and one kept prefix tail per request need."""
        return needed_window_tokens(self.settings.chunk_tokens, requests, tails=requests)

    def sizes(self, tokens: int, requests: int) -> Sizes:
        """With the SWA pool that the requests need: no more than there are tokens, enough for a chunk."""
        if self.window_share is not None:
            return Sizes(tokens, int(tokens * self.window_share) // PAGE * PAGE, requests)
        smallest = smallest_window_tokens(self.settings.chunk_tokens)
        return Sizes(tokens, max(smallest, min(tokens, self.needed_window(requests))), requests)

    def limit_of(self, sizes: Sizes) -> str | None:
        """The first limit that `sizes` exceed; None: they fit."""
        try:
            found = objects(self.shape, self.settings, sizes)
        except PlanError:
            return HOT
        if total(found, "device") > self.budget.device:
            return DEVICE
        if self.budget.host is not None and total(found, "host") > self.budget.host:
            return HOST
        return None

    def limit(self, tokens: int, requests: int) -> str | None:
        """`limit_of` the sizes for `tokens` and `requests`."""
        return self.limit_of(self.sizes(tokens, requests))

    def most_requests(self, context: int, cap: int | None = None) -> Fit:
        """Most requests of `context` tokens each that run at once, at most `cap`, and the tokens they take."""
        each = whole_pages(context)
        top = MOST_REQUESTS if cap is None else cap
        requests = largest(lambda n: self.limit(n * each, n) is None, top)
        if requests == top:
            return Fit(requests, requests * each, RUNNING)
        limit = self.limit((requests + 1) * each, requests + 1)
        assert limit is not None
        return Fit(requests, requests * each, limit)

    def most_tokens(self, requests: int) -> Fit:
        """Most tokens, running or kept by the radix tree, while `requests` run at once. 0: none."""
        pages = largest(lambda n: self.limit(n * PAGE, requests) is None, 1 << 36)
        limit = self.limit((pages + 1) * PAGE, requests)
        assert limit is not None
        return Fit(requests, pages * PAGE, limit)


def whole_pages(tokens: int) -> int:
    """`tokens` rounded up to whole pages: what a request of that length takes."""
    return -(-tokens // PAGE) * PAGE


def largest(fits: Callable[[int], bool], top: int) -> int:
    """The largest n in 0..top with fits(n), given that fits(n) implies fits(n - 1); 0 needs not be asked."""
    low, step = 0, 1
    while low + step <= top and fits(low + step):
        low += step
        step *= 2
    high = min(top + 1, low + step)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
