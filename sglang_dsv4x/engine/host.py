"""Seams: SGLang's batch bookkeeping that runs in Triton although there is no GPU; each has a torch form upstream.

SGLang chooses by the attention backend's name, and DeepSeek-V4's is "dsv4" on every device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .hooks import Seam


def support_triton(original: Callable[[str], bool], backend: str) -> bool:
    """Whether Triton kernels can run for `backend`: never without a GPU."""
    return torch.cuda.is_available() and original(backend)


def last_locations(
    original: Callable[..., torch.Tensor],
    req_to_token: torch.Tensor,
    req_pool_indices_tensor: torch.Tensor,
    prefix_lens_tensor: torch.Tensor,
) -> torch.Tensor:
    """Location of every request's last cached token, -1 where there is none."""
    from sglang.srt.mem_cache import allocation

    if torch.cuda.is_available():
        return original(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)
    return allocation.get_last_loc_torch(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)


SEAMS = [
    Seam(
        path="sglang.srt.mem_cache.allocation.support_triton",
        signature="(backend)",
        kind="around",
        reason="writing a batch's locations into the request table",
        hook=support_triton,
        only="torch",
    ),
    Seam(
        path="sglang.srt.model_executor.forward_batch_info.support_triton",
        signature="(backend)",
        kind="around",
        reason="token positions of a prefill batch",
        hook=support_triton,
        only="torch",
    ),
    Seam(
        path="sglang.srt.mem_cache.allocation.get_last_loc_triton",
        signature="(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)",
        kind="around",
        reason="the location that a request's next page follows",
        hook=last_locations,
        only="torch",
    ),
    Seam(
        path="sglang.srt.mem_cache.allocation.get_last_loc_torch",
        signature="(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)",
        kind="read",
        reason="upstream's torch form of it",
        only="torch",
    ),
]
