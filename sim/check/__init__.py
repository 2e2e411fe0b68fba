"""Simulated runs against measured ones, and schedules against recorded ones."""
