"""Allocation and reset of the slot tables; what they mean is said in `jit_kernels/resolve.py`."""

from __future__ import annotations

import torch

from ..jit_kernels.resolve import ABSENT, FREE, SlotTables
from ..jit_kernels.resolve_cuda import new_scratch
from .shape import TierShape


def new_tables(shape: TierShape, device: torch.device) -> SlotTables:
    """Tables of all layers, everything cold. Their addresses never change."""
    layers, groups, unit = shape.layers, shape.groups + 1, shape.unit
    tables = SlotTables(
        unit_group=torch.empty((layers, shape.units + 1), dtype=torch.int32, device=device),
        group_tag=torch.empty((layers, groups), dtype=torch.int32, device=device),
        last_used=torch.empty((layers, groups), dtype=torch.int32, device=device),
        held=torch.empty((layers, groups), dtype=torch.int64, device=device),
        state=torch.empty((layers, groups, unit), dtype=torch.uint8, device=device),
        order=torch.arange(shape.groups, device=device).repeat(layers, 1),
        clock=torch.zeros(1, dtype=torch.int32, device=device),
        scratch=new_scratch(layers, shape.groups, shape.units, device) if device.type == "cuda" else None,
    )
    clear_tables(tables)
    return tables


def clear_tables(tables: SlotTables) -> None:
    """Everything cold again, in place. The clock goes on."""
    tables.unit_group.fill_(tables.groups)
    tables.group_tag.fill_(tables.units)
    tables.last_used.fill_(FREE)
    tables.held.fill_(FREE)
    tables.state.fill_(ABSENT)
