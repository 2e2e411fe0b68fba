"""How long a million examples take to be packed on one core: `python -m tests.support.packing_speed [--json]`."""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from batchsim.training.packers.registry import PACKERS
from batchsim.workload.laws import LognormalTokens, draw_tokens

EXAMPLES = 1_000_000
ROW = 2048
PACKED = {
    "megatron_bridge.first_fit_decreasing": {"pack_size": ROW},
    "megatron_bridge.first_fit_shuffle": {"pack_size": ROW},
    "trl.bfd": {"seq_length": ROW},
}


def packing_speed() -> dict[str, float]:
    """Seconds of CPU by packer, for lengths of a lognormal law with mean 525 in rows of 2,048."""
    law = LognormalTokens(mean=525, cv=1.12, min=8, max=ROW)
    lengths = draw_tokens(law, np.random.default_rng(0), EXAMPLES).tokens.tolist()
    taken: dict[str, float] = {}
    for kind, options in PACKED.items():
        start = time.process_time()
        PACKERS[kind](**options).pack(lengths, range(EXAMPLES))
        taken[kind] = time.process_time() - start
    return taken


if __name__ == "__main__":
    result = packing_speed()
    print(json.dumps(result) if "--json" in sys.argv else "\n".join(f"{k} {s:.2f} s" for k, s in result.items()))
