"""Checks against reality: simulated runs against measured ones, schedules against ones recorded from real engines."""
