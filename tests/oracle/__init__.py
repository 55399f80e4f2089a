"""Comparison with things this project did not write: the authors' torch model and the unpatched pin."""
