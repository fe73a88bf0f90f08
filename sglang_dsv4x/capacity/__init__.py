"""What a DeepSeek-V4 server holds, to the byte: the model behind `sglang-dsv4x plan` and the engine's sizing.

Knows neither torch nor SGLang: sizes in, bytes out.
"""
