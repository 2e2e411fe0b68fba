"""Measured points of real engines, simulated: `python -m tests.silicon` prints how far off TTFT and TPOT are."""
