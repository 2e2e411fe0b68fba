"""Drivers of engines: sources of requests, simulated time, a clock; a scenario that needs no YAML."""
