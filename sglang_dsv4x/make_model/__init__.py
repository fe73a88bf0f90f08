"""Random, well-scaled DeepSeek-V4 checkpoints."""

from .checkpoint import make_model
from .command import add_arguments, run
from .errors import MakeModelError

__all__ = ["MakeModelError", "add_arguments", "make_model", "run"]
