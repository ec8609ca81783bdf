"""Formats: frozen dataclasses over tensors that multiply, transpose and know what they cost."""
