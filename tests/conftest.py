import hypothesis
import pytest
import torch

# The same examples on every run and machine; no deadline, as CI machines stall now and then.
hypothesis.settings.register_profile("gblr", max_examples=50, deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("gblr")
torch.set_num_threads(1)  # tensors here are tiny: threads cost more than they give


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
