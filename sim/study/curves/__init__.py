"""The load axis: loads found by themselves, a varied key, seeds added until precise, and what a curve shows."""
