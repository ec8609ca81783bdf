"""Experiments of the paper on real data, one file per table or figure."""
