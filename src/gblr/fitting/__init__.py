"""Dense to structured: approximate one trained weight, or a batch of equal shape."""
