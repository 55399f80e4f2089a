"""Quantization recipes as TOML files, read by ``dflash2_gguf.presets``."""
