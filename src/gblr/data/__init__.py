"""Data for experiments and the demo."""
