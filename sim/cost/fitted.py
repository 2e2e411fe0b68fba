"""Step times fitted to measured runs: a kernel's time and small linear terms, found by `batchsim calibrate`.

    step = kernel · kernel(step) + base · passes + sequence · sequences + prompt_token · prompt tokens
         + context_token · context that decodes read + beside_token · such context beside a chunk + pair · pairs
         + rows_2 · [2 rows or more] + rows_4 · [4 or more] + rows_8 · [8 or more]

A row is a token computed. Kernels for one row, for a few and for many differ, so that a step may cost the same with two
sequences as with three, and much less with one. Where an engine splits steps into passes (`Batch.num_passes`; else a
step is one), each reads the weights, and kernels see a pass: rows_2 is of each pass of 2 rows or more, and rows_4 and
rows_8 are of no step.
`kernel(step)` is another cost without its host; the free form has none. All terms lie on the device's lane, so that
they add up in engines that schedule ahead of results too: a host's time that is hidden there is in no term.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

from batchsim.base.errors import ScenarioError
from batchsim.base.later import np
from batchsim.base.ranges import Config, Range
from batchsim.base.units import format_duration, two_digits
from batchsim.cost.base import Cost
from batchsim.cost.cost_error import CostError, Unknown, symmetric
from batchsim.cost.drafter_config import DraftersConfig
from batchsim.cost.encoder_config import EncoderConfig
from batchsim.cost.work import TIME_TERMS, Columns, Terms, columns_of, padded_work
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.model import ModelSpec
from batchsim.kernel.batch import Batch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from batchsim.cost.profile import Hull

ROW_STEPS = (2, 4, 8)
"""Rows from which on a step may cost more at once."""
Nanoseconds = Annotated[float, Range(0, 1e15)]
"""ns of a term for each unit that it multiplies."""


@dataclass(frozen=True, slots=True)
class StepTerms(Config):
    """The factor on the kernel's time, and times in ns. Padding counts."""

    kernel: Annotated[float, Range(0, 1e3)] = 0.0
    """Factor on the kernel's time."""
    base: Nanoseconds = 0.0
    """ns for each pass of a step."""
    sequence: Nanoseconds = 0.0
    """ns for each sequence of a step."""
    prompt_token: Nanoseconds = 0.0
    """ns for each prompt token computed."""
    context_token: Nanoseconds = 0.0
    """ns for each context token that decodes read."""
    beside_token: Nanoseconds = 0.0
    """ns more for each context token read beside a chunk."""
    pair: Nanoseconds = 0.0
    """ns for each query-key pair of chunks."""
    rows_2: Nanoseconds = 0.0
    """ns for each step, or pass, of two tokens or more."""
    rows_4: Nanoseconds = 0.0
    """ns more for each step of four tokens or more."""
    rows_8: Nanoseconds = 0.0
    """ns more for each step of eight tokens or more."""

    def __str__(self) -> str:
        units = {"base": "", "sequence": " a sequence", "prompt_token": " a prompt token"}
        units |= {"context_token": " a context token", "beside_token": " a context token beside a chunk"}
        units |= {"pair": " a query-key pair"} | {f"rows_{n}": f" from {n} rows on" for n in ROW_STEPS}
        parts = [f"{self.kernel:.3g} × kernel"] if self.kernel else []
        parts += [f"{_short(ns)}{unit}" for name, unit in units.items() if (ns := getattr(self, name))]
        return " + ".join(parts) or "nothing"


TERMS = tuple(field.name for field in fields(StepTerms))
"""The names of the terms, `kernel` first."""


def _short(ns: float) -> str:
    return format_duration(ns) if ns >= 10 else f"{ns:.2g} ns"


@dataclass(frozen=True, slots=True)
class Fitted(Cost):
    """The step times of `terms` over `kernel`, None for the free form.

    `words` says what they were fitted to; `tpot_error` is the error claimed for the mean TPOT of other loads, or for
    the time of steps where recorded ones were fitted to, as a share, None where none is claimed.
    """

    kernel: Cost | None
    terms: StepTerms
    words: str = ""
    tpot_error: float | None = None

    def step_ns(self, batch: Batch) -> int:
        """The step's duration in ns, at least 1: the sum of the terms, rounded."""
        terms, chunks = self.terms, len(batch.chunks) + batch.pad_prefill_rows
        context = batch.context_tokens + batch.pad_context_tokens
        prompt = batch.num_prefill_tokens + batch.pad_prefill_tokens
        ns = terms.base * (batch.num_passes or 1) + terms.prompt_token * prompt + terms.context_token * context
        ns += terms.sequence * (batch.num_decode + batch.pad_decode_rows + chunks)
        if chunks:
            ns += terms.beside_token * context
        if terms.pair and (prompt or batch.num_decode_tokens > batch.num_decode):
            ns += terms.pair * int(padded_work(columns_of(batch)).pairs[0])
        if batch.num_passes:
            ns += terms.rows_2 * batch.num_wide_passes
        elif terms.rows_2 or terms.rows_4 or terms.rows_8:
            rows = prompt + batch.num_decode_tokens + batch.pad_decode_rows
            ns += terms.rows_2 * (rows >= 2) + terms.rows_4 * (rows >= 4) + terms.rows_8 * (rows >= 8)
        if self.kernel is not None and terms.kernel:
            ns += terms.kernel * self.kernel.step_ns(batch)
        return round(ns) or 1

    def recompute_ns(self, num_tokens: int) -> int:
        """ns of a step that computes the first `num_tokens` of one sequence, and nothing else."""
        terms, kernel = self.terms, 0 if self.kernel is None else self.kernel.recompute_ns(num_tokens)
        own = terms.base + terms.sequence + terms.prompt_token * num_tokens
        own += terms.pair * num_tokens * (num_tokens + 1) // 2
        own += sum(getattr(terms, f"rows_{n}") for n in ROW_STEPS if num_tokens >= n)
        return round(terms.kernel * kernel + own)

    def swap_ns(self, num_blocks: int) -> int:
        """ns of moving `num_blocks` over the host link as the kernel has it; the free form knows nothing of it: 0."""
        return 0 if self.kernel is None else round(self.terms.kernel * self.kernel.swap_ns(num_blocks))

    def features(self, columns: Columns) -> NDArray[np.float64]:
        """What each term multiplies, in recorded steps: an array of a row a step and a column for each of TERMS.

        Its product with the terms is what each step takes, to the rounding.
        """
        work, chunks = padded_work(columns), columns["num_chunks"] + columns["pad_prefill_rows"]
        kernel = np.zeros(len(chunks))
        if self.kernel is not None:
            parts = self.kernel.explain(columns)
            kernel = sum((parts[name] for name in TIME_TERMS), kernel)
        prompt = columns["num_prefill_tokens"] + columns["pad_prefill_tokens"]
        beside = work.context * (chunks > 0)
        rows = prompt + columns["num_decode_tokens"] + columns["pad_decode_rows"]
        passes, wide = columns["num_passes"], columns["num_wide_passes"]
        stairs = [(rows >= n) & (passes == 0) for n in ROW_STEPS]
        stairs[0] = stairs[0] + wide
        work_columns = (kernel, np.maximum(passes, 1), work.sequences, prompt, work.context, beside, work.pairs)
        return np.stack((*work_columns, *stairs), axis=1).astype(np.float64)

    def explain(self, columns: Columns) -> Terms:
        """The kernel's terms times its factor; context under `kv_reads`, pairs under `attention`, the rest `host`."""
        terms, zeros = self.terms, np.zeros(len(columns["num_decode"]))
        _, base, sequences, prompt, context, beside, pairs, *rows = self.features(columns).T
        stairs = sum((getattr(terms, f"rows_{n}") * on for n, on in zip(ROW_STEPS, rows, strict=True)), zeros)
        own = {
            "kv_reads": terms.context_token * context + terms.beside_token * beside,
            "attention": terms.pair * pairs,
            "host": terms.base * base + terms.sequence * sequences + terms.prompt_token * prompt + stairs,
        }
        explained = dict.fromkeys(TIME_TERMS, zeros) | own
        if self.kernel is None:
            return explained | {"flops": zeros, "bytes": zeros}
        parts = self.kernel.explain(columns)
        explained = {name: ns + terms.kernel * parts[name] for name, ns in explained.items()}
        return explained | {"flops": parts["flops"], "bytes": parts["bytes"]}

    def describe(self) -> str:
        held = "" if self.tpot_error is None else f", ±{two_digits(100 * self.tpot_error)} % claimed"
        return f"cost: fitted to {self.words or 'measured runs'}{held}: {self.terms}"

    def sources(self) -> list[str]:
        """Lines on where the numbers come from: the fit, and the kernel beneath."""
        kernel = ["kernel: none, the free form"] if self.kernel is None else self.kernel.sources()
        return [f"fitted to {self.words or 'measured runs'}: {self.terms}", *kernel]

    @property
    def deployment(self) -> Deployment | None:
        return None if self.kernel is None else self.kernel.deployment

    @property
    def reach(self) -> Hull | None:
        return None if self.kernel is None else self.kernel.reach

    @property
    def error(self) -> CostError | Unknown:
        if self.tpot_error is None:
            return Unknown("the fit claims none")
        return symmetric(self.tpot_error, f"claimed by the fit to {self.words}")


@dataclass(frozen=True, slots=True)
class Free(Cost, Config):
    """`cost: {kind: free}`: step times of hardware without tables, which are yet to be fitted.

    Config and cost in one; ScenarioError when asked for a time.
    """

    kind: Literal["free"] = "free"
    draft: DraftersConfig | None = None
    """What drafting costs, by method."""
    encoder: EncoderConfig | None = None
    """What encoding images, audios and videos takes, beside the steps."""
    num_gpus: Annotated[int, Range(1, 1024)] = 1
    """GPUs that the cost stands for: prices count them."""

    def build(self, model: ModelSpec, *, block_size: int = 16, max_model_len: int | None = None) -> Free:
        """Itself, whatever the model: it is config and cost in one."""
        return self

    def step_ns(self, batch: Batch) -> int:
        self._refuse()

    def recompute_ns(self, num_tokens: int) -> int:
        self._refuse()

    def swap_ns(self, num_blocks: int) -> int:
        self._refuse()

    def explain(self, columns: Columns) -> Terms:
        self._refuse()

    def describe(self) -> str:
        return "cost: free form, not fitted yet"

    def sources(self) -> list[str]:
        return ["step times: yet to be fitted"]

    def _refuse(self) -> NoReturn:
        raise ScenarioError(
            "cost of kind free has no numbers yet. Fit them: batchsim calibrate --bench FILES --scenario SCENARIO -o"
            " mine.json, then write cost: mine.json."
        )
