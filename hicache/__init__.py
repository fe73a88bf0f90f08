"""The tiered C4 cache: identity-mapped host store, hot slots without ownership. Knows torch, not SGLang."""
