"""Model shapes and launch presets, as files; see `available()` and `load()`."""
