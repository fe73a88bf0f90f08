"""What a trace does not say and its reader must."""

from __future__ import annotations

from typing import NamedTuple

# English text and code come to about four characters a token with most tokenizers.
CHARACTERS_PER_TOKEN = 4.0
# Tokens of a block where a format leaves them open: Mooncake's and AIPerf's default.
MOONCAKE_BLOCK = 512
# Blocks that prompts made of text are cut into; it divides SGLang's pages.
TEXT_BLOCK = 64
LARGEST_BLOCK = 65536
# Output length where a trace names none: bench_serving's default for agentic-trace.
OUTPUT_TOKENS = 220
# Agents that start agents: deeper than any real trace, and far from Python's recursion limit.
DEEPEST_AGENT = 64


class LoadOptions(NamedTuple):
    """`block_size`: tokens of a hash id's block, for formats that leave it open (None: the format's default);
    `characters_per_token`: how long text is (None: what the trace's own counts say, else CHARACTERS_PER_TOKEN)."""

    block_size: int | None = None
    characters_per_token: float | None = None
