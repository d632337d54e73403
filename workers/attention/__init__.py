"""Attention over pages: the reference that is always right, and faster kernels that must equal it."""
