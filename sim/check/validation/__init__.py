"""Simulation against live runs: errors of step times and latencies, where schedules first differ, and the verdict."""
