"""batchsim: simulates how batching policies serve LLM requests. One pure scheduler, two drivers.

    import batchsim
    results = batchsim.load_results("results/bursty")    # what `batchsim run bursty` left, as DataFrames

    workload = batchsim.Workload(batchsim.Poisson("8/s"), output_cap=512, duration="2min", lengths=batchsim.Lengths(
        batchsim.Lognormal(mean=900, cv=1.2), batchsim.Fixed(200)))
    scenario = batchsim.Scenario(model="llama-3.1-8b", deployment=batchsim.Deployment("vllm", "h100_sxm"),
                                 workload=workload, slo="ttft<1s & tpot<50ms @ 99%")
    results = batchsim.run(scenario)
    results.requests("vllm", 1.0, seed=0)[["ttft_s", "tpot_s", "e2e_s"]].describe()

The names stand in `__init__.pyi` and are fetched when asked for, so that a machine without pandas can import the parts
that need none.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

from batchsim.base.files import read_text
from batchsim.base.version import VERSION

__version__ = VERSION

_HOME = {
    name.asname or name.name: (str(node.module), name.name)
    for node in ast.parse(read_text(Path(__file__).with_suffix(".pyi"))).body
    if isinstance(node, ast.ImportFrom)
    for name in node.names
}
"""By public name the module that it is in, and what it is called there."""

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'batchsim' has no attribute {name!r}")
    module, there = _HOME[name]
    member = getattr(import_module(module), there)
    return member.__base__ if module == "batchsim.api.typed" else member  # what is there is for type checkers alone
