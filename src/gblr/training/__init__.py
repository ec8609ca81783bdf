"""Learning the structure under a budget (Algorithm 1 of the paper)."""
