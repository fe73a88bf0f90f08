"""What `make-model` refuses."""

from __future__ import annotations


class MakeModelError(ValueError):
    """The checkpoint cannot be written; the message names the key, path or number of bytes, and the remedy."""
