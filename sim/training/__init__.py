"""Training: how examples of unequal length become batches, what a step with them costs, and how ranks wait for each
other."""
