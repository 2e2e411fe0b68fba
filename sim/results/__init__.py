"""The folder `results/`: what a run leaves there, written whole or not at all, and read again as DataFrames."""
