"""Whether a live SGLang server's prefix cache, and this extension's tier, do what they should: a few requests, each
with what it must hit and what it must answer.

`probe` sends requests, `answers` compares outputs, `checks` knows what is expected and why it may fail, `command` is
`sglang-dsv4x verify`.
"""
