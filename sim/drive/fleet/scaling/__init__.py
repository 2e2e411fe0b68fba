"""Autoscalers, each kind in a file of its own; `kinds` names them all, `autoscaler` has what they share."""
