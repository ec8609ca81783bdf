"""Inverse Cholesky factors of many small matrices; for GPUs alone, elsewhere LAPACK does it (`gblr.fitting.solve`)."""
