"""One thread for torch: with two on a small machine a step jitters by an order of magnitude."""

try:
    import torch
except ImportError:  # the tests that need it skip themselves
    pass
else:
    torch.set_num_threads(1)
