"""The shadow: a resident copy of every C4 row, against which the tier's reads are checked. Debugging only."""

from __future__ import annotations

import torch

from .errors import IntegrityError
from .shape import TierShape


class ShadowStore:
    """Rows u8 [L, E, row_bytes] on the device, and which of them were written since the location was last
    freed.

    It costs the device memory that the tier saves.
    """

    def __init__(self, shape: TierShape, device: torch.device) -> None:
        self.rows = torch.empty(
            (shape.layers, shape.entries, shape.layout.row_bytes), dtype=torch.uint8, device=device
        )
        self.written = torch.zeros((shape.layers, shape.entries), dtype=torch.bool, device=device)

    def announce(self, entries: torch.Tensor) -> None:
        """The entries (int64 [W]) get new owners in this step: nobody may read them before their write."""
        self.written.index_fill_(1, entries, False)

    def write(self, layer: int, entries: torch.Tensor, rows: torch.Tensor) -> None:
        """Copies what is written to the tier: entries int64 [W], rows u8 [W, row_bytes]."""
        self.rows[layer].index_copy_(0, entries, rows)
        self.written[layer].index_fill_(0, entries, True)

    def forget(self, entries: torch.Tensor | None) -> None:
        """Freed locations (all of them for None): a read of one is an error until it is written again."""
        if entries is None:
            self.written.zero_()
        else:
            self.written.index_fill_(1, entries, False)

    def verify(self, layer: int, entries: torch.Tensor, rows: torch.Tensor, read_by: str) -> None:
        """Raises IntegrityError unless rows u8 [N, row_bytes] are what the owners of entries int64 [N]
        wrote."""
        unwritten = ~self.written[layer].index_select(0, entries)
        if bool(unwritten.any()):
            entry = int(entries[unwritten][0])
            raise IntegrityError(
                f"layer {layer}, entry {entry}: {read_by} reads a row that its owner has not written"
            )
        expected = self.rows[layer].index_select(0, entries)
        if not torch.equal(rows, expected):
            row, byte = (rows != expected).nonzero()[0].tolist()
            raise IntegrityError(
                f"layer {layer}, entry {int(entries[row])}: {read_by} differs from the resident copy from "
                f"byte {byte} on ({int(rows[row, byte]):#04x} instead of {int(expected[row, byte]):#04x})"
            )
