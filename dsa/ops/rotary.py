"""Rotary position embedding, in PyTorch by design: the kernels that need it have it inside."""

from reference.rotary import apply_rotary

__all__ = ["apply_rotary"]
