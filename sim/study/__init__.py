"""Many points at once: sweeps, curves over the load, capacities, plans."""
