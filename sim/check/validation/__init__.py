"""Simulated against measured: errors of steps and latencies, where schedules part, and the verdict."""
