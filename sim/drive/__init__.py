"""Drivers of engines: sources of requests, simulated time, a clock."""
