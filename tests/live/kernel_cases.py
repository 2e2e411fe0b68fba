"""Steps on which the Triton kernels are held against SDPA, shared by the interpreter's and the GPU's tests.

Run as a module, with TRITON_INTERPRET=1, it does all of them on the CPU in fp32 and prints a JSON object: case name to
the error of each kernel, or to the traceback of the case.
"""

from __future__ import annotations

import json
import traceback
from dataclasses import dataclass, replace

import numpy as np
import torch

from batchsim.calibrate.engine.backend import SdpaBackend
from batchsim.calibrate.engine.inputs import StepInputs
from batchsim.calibrate.engine.triton_backend import Shapes, TritonBackend
from tests.live.kernel_check import Heads, disagreement

SMALL = Shapes(prefill_rows=32, prefill_keys=64, decode_keys=64)  # 32 keys of fp32: many tiles in a short context


@dataclass(frozen=True)
class Case:
    """A step and how its kernels are cut. The last `pad_rows` decodes are padding: they read block 0, store nothing.

    `decodes`: computed tokens of each; `chunks`: (prefix, tokens). `unstored`: of the last chunk, tokens of padding.
    """

    heads: Heads
    decodes: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    pad_rows: int = 0
    unstored: int = 0
    head_norms: bool = False
    programs: tuple[int, ...] = (6,)
    shapes: Shapes = SMALL

    def inputs(self) -> StepInputs:
        """The step, its blocks scattered over a pool with twice the room."""
        num_tokens = sum(n + 16 for n in self.decodes) + sum(sum(chunk) + 16 for chunk in self.chunks)
        inputs = StepInputs.synthetic(
            self.decodes, self.chunks, block_size=self.heads.block_size,
            num_blocks=2 * num_tokens // self.heads.block_size + 2, vocab_size=100, seed=0,
        )  # fmt: skip
        tables, slots = inputs.block_tables.copy(), inputs.slots.copy()
        pads = slice(len(self.decodes) - self.pad_rows, len(self.decodes))
        tables[pads], slots[pads] = 0, -1
        slots[len(slots) - self.unstored :] = -1
        return replace(inputs, block_tables=tables, slots=slots)

    def errors(self, device: str, dtype: torch.dtype) -> dict[str, float]:
        """The largest relative error of each kernel's rows over the numbers of programs."""
        found = [
            disagreement(
                TritonBackend(self.shapes, num_programs=n), SdpaBackend(), self.inputs(), self.heads, device=device,
                dtype=dtype, head_norms=self.head_norms,
            )
            for n in self.programs
        ]  # fmt: skip
        return {name: float(np.max([errors[name] for errors in found])) for name in found[0]}


RAGGED = (0, 16, 31, 32, 99, 200)
MIXED = ((0, 5), (33, 1), (0, 40), (64, 9), (7, 64), (150, 3))
CASES = {
    "group 1, blocks of 16": Case(Heads(2, 2, 16, 16), RAGGED, MIXED),
    "group 4, blocks of 32": Case(Heads(8, 2, 16, 32), RAGGED, MIXED),
    "group 5, head norms": Case(Heads(5, 1, 32, 16), RAGGED, MIXED, head_norms=True),
    "group 7": Case(Heads(14, 2, 16, 16), RAGGED, MIXED),
    "head_dim 128 in the tiles of the GPU": Case(Heads(4, 1, 128, 16), (300,), ((100, 70),), shapes=Shapes()),
    "one decode, in parts enough to add in two goes": Case(Heads(4, 1, 16, 16), (1130,), programs=(1, 2, 36)),
    "one long context among short ones": Case(Heads(4, 2, 16, 16), (3, 600, 1, 40), programs=(1, 3, 8, 50)),
    "rows beyond the first class": Case(Heads(4, 2, 16, 16), tuple(range(40)), programs=(5, 64)),
    "one chunk of one token": Case(Heads(4, 2, 16, 16), (), ((20, 1),)),
    "padded rows and chunk": Case(Heads(4, 2, 16, 16), (20, 70, 0, 40, 0), ((0, 8), (16, 20)), 3, 6, programs=(2, 9)),
    "blocks of 4": Case(Heads(4, 2, 16, 4), RAGGED, MIXED),
}


def main() -> None:
    """Prints every case's errors."""
    torch.set_num_threads(1)
    report: dict[str, dict[str, float] | str] = {}
    for name, case in CASES.items():
        try:
            report[name] = case.errors("cpu", torch.float32)
        except Exception:  # the test of this case shows it
            report[name] = traceback.format_exc()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
