"""Who cranks an engine: where requests come from, simulated time, a clock; a scenario that needs no YAML."""
