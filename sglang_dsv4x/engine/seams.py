"""The one table of every place where SGLang is changed or relied upon, and what happens in each kind of process."""

from __future__ import annotations

import torch

from ..config import Dsv4xConfig, apply_process_environment
from ..jit_kernels import registry
from .hooks import Seam, install, require


def serves_with_torch(config: Dsv4xConfig) -> bool:
    """Is any op of this process a torch reference? Then SGLang's steps are planned for torch, whatever the others are.

    Raises: KernelError when the asked backend cannot serve.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return "torch" in registry.select(config.kernels, device).chosen.values()


def engine_seams() -> list[Seam]:
    """Seams of the scheduler processes. Importing them imports SGLang's model, pool and scheduler modules."""
    from . import allocator, backend_seams, banner, host, metrics, model, pool, resume, sizing

    return [
        *pool.SEAMS,
        *sizing.SEAMS,
        *allocator.SEAMS,
        *backend_seams.SEAMS,
        *model.SEAMS,
        *metrics.SEAMS,
        *host.SEAMS,
        *resume.SEAMS,
        *banner.SEAMS,
    ]


def argument_seams() -> list[Seam]:
    """Seams of argument parsing and validation, used where a server is started."""
    from . import server_args

    return [*server_args.COMMAND_LINE_SEAMS, *server_args.VALIDATION_SEAMS]


def install_command_line() -> None:
    """Phase 1, at plug-in load: only the flags. Raises: SeamError."""
    from . import server_args

    install(server_args.COMMAND_LINE_SEAMS, torch_kernels=False)


def prepare_launch(config: Dsv4xConfig) -> None:
    """Phase 2 where a server is started: the environment, then the whole table is checked; validation is patched.

    Raises: SeamError, ConfigError, KernelError.
    """
    from . import server_args

    apply_process_environment(torch_kernels=serves_with_torch(config), cuda=torch.cuda.is_available())
    require(engine_seams())
    install(server_args.VALIDATION_SEAMS, torch_kernels=False)


def install_engine(config: Dsv4xConfig) -> None:
    """Phase 2 in a scheduler process, before its models are imported: the whole table is checked and patched.

    Raises: SeamError, ConfigError, KernelError.
    """
    torch_kernels = serves_with_torch(config)
    apply_process_environment(torch_kernels=torch_kernels, cuda=torch.cuda.is_available())
    install(engine_seams(), torch_kernels=torch_kernels)
