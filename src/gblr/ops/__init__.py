"""The equations: functions on tensors and nothing else."""
