"""Olmo 3 pre-training reproduced in JAX, as a pipeline that proves the reproduction."""

__version__ = "0.1.0"
