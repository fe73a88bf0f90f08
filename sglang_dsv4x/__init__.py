"""DeepSeek-V4 in SGLang with a tiered C4 KV cache and the radix prefix cache on."""

__version__ = "0.1.0"
