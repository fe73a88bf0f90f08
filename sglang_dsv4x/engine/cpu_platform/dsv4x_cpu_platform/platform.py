"""The platform class that SGLang instantiates where `activate` chose it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class Dsv4xCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU without `sgl_kernel`.

    SGLang's own CPU engine (SGLANG_USE_CPU_ENGINE=1) imports that package's CPU operators, which are on no package
    registry. As an out-of-tree platform this class leads SGLang past every such import. Imports of SGLang's pools
    wait until they are asked for: SGLang makes the platform while it is still importing itself.
    """

    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        """For models that do not name a backend themselves (DeepSeek-V4 names its own)."""
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_mla_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        return MLATokenToKVPool

    def get_paged_allocator_cls(self) -> Callable[..., Any]:
        """SGLang only calls it, with the pool; which class fits depends on that pool."""
        from .allocators import make_allocator

        return make_allocator

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """Pinning is for a device's copies; there is none."""
        return False
