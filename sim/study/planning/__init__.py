"""Capacity planning: how many replicas of which GPU under which policy a traffic needs, what it costs.

In order: `demand` (the traffic and its busiest window), `probe` (groups of replicas simulated on it), `fleet_search`
(the smallest group that holds), `money` (what it costs), `tables` (all of it as rows), `make` (the whole).
"""
