"""batchsim: simulates how batching policies serve LLM requests. One pure scheduler, two drivers.

    import sim
    results = sim.load_results("results/bursty")    # what `batchsim run bursty` left, as DataFrames
"""

from sim.run import Results, load_results, run_scenario
from sim.scenario import load_scenario

__all__ = ["Results", "load_results", "load_scenario", "run_scenario"]
