"""Routers of real systems, each in a file of its own; `router` is what all share. `drive.fleet.routing` names them."""
