"""Pictures and tables of results: numpy in, files out, no torch."""
