"""SGLang's platform plug-in for machines without a GPU. SGLang loads `activate` by its entry point `dsv4x_cpu`.

Imported at every interpreter start through the distribution's .pth file, hence no import of torch up here.
"""

from __future__ import annotations

PLATFORM_CLASS = "dsv4x_cpu_platform.platform.Dsv4xCpuPlatform"


def activate() -> str | None:
    """Dotted path of the platform class, or None where CUDA is available and SGLang's own platform shall serve."""
    import torch

    return None if torch.cuda.is_available() else PLATFORM_CLASS
