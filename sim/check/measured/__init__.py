"""Measured runs of engines: what benchmark tools leave behind, read into one noun, `MeasuredRun`."""
