"""The metrics of a run, each defined once, and the objectives (SLOs) that they are judged by."""
