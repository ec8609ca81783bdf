"""Networks for experiments. They know nothing of structure: it enters by conversion alone."""
