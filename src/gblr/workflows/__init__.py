"""What the command line does, as functions: finding models and data, compressing, training, measuring."""
