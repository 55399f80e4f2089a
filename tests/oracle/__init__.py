"""Comparison with what others wrote: the authors' torch model and the unpatched pin."""
