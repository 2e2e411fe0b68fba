"""What a request carries besides its time: its class, its lengths, its cap and its client's patience."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import ScenarioError
from batchsim.base.units import two_digits
from batchsim.kernel.tokens import TokenIds
from batchsim.kernel.types import Arrival, Item, Request
from batchsim.workload.adapter_draws import AdapterDraws
from batchsim.workload.items import DrawnItems, draw_items
from batchsim.workload.laws import DrawnTokens, draw_tokens
from batchsim.workload.lengths import (
    AnyLengths,
    Lengths,
    ListLengths,
    PairLengths,
    StepLengths,
    draw_outputs,
    draw_pairs,
)
from batchsim.workload.structured import draw_constrained
from batchsim.workload.traces.random_stream import random_stream
from batchsim.workload.traces.trace_rows import Ints, TraceRows
from batchsim.workload.workload_config import Patience, TrafficClass, WorkloadConfig

Describe = dict[str, str | int | float | None]
Stream = partial[np.random.Generator]
FOR_EVER_NS = np.iinfo(np.int64).max  # the patience of a client that never cancels


@dataclass(frozen=True)
class RequestColumns:
    """Drawn requests as columns. `request_class` is the index of the class; `asked_tokens` the output before the cut.

    Length columns are in tokens, patience in ns or FOR_EVER_NS. `drawn_*` are lengths before the limits of their law.
    A prompt begins with `group_tokens` of shared prefix number `group`; -1: with none. `context_tokens` of it are the
    earlier turns of its session. `acceptance` is the probability that a draft token is right where those before it are,
    as its trace has it, NaN without one. `ignore_eos` is 1 where the client asks for just the tokens that come, else 0.
    `tenant` indexes the tenants of the trace, `adapter` the LoRA adapters of the workload, -1: none; `deadline_ns`
    counts from the sending, -1: none. `constrained` is 1 where a grammar constrains the answer, else 0. `items`:
    images, audios and videos, with tokens among those of the prompts; None: no request has any.
    """

    request_class: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    asked_tokens: Ints
    max_output_tokens: Ints
    patience_ns: Ints
    drawn_prompt: NDArray[np.float64] | Ints
    drawn_output: NDArray[np.float64] | Ints
    group: Ints
    group_tokens: Ints
    context_tokens: Ints
    ignore_eos: Ints
    acceptance: NDArray[np.float64]
    priority: Ints
    tenant: Ints
    deadline_ns: Ints
    adapter: Ints
    constrained: Ints
    items: DrawnItems | None = None

    @property
    def carried(self) -> tuple[Ints, ...]:
        """The columns of which `RequestSampler.arrival` takes a value each, in its order."""
        return (
            self.request_class, self.prompt_tokens, self.output_tokens, self.max_output_tokens, self.patience_ns,
            self.ignore_eos, self.priority, self.tenant, self.deadline_ns, self.adapter, self.constrained,
        )  # fmt: skip

    @property
    def own_tokens(self) -> Ints:
        """Tokens of each prompt beyond its shared prefix, the earlier turns of its session and its items."""
        own = self.prompt_tokens - self.group_tokens - self.context_tokens
        return own - (0 if self.items is None else self.items.tokens_of)

    def __len__(self) -> int:
        return len(self.request_class)

    def picked(self, index: Ints) -> RequestColumns:
        """The requests at the rows `index`."""
        columns = {field.name: getattr(self, field.name)[index] for field in fields(self) if field.name != "items"}
        return RequestColumns(**columns, items=None if self.items is None else self.items.picked(index))


class RequestSampler:
    """Draws requests as columns, each purpose from a random stream of its own: its n-th draw depends on nothing else.

    `names` are the classes in the scenario's order, or one nameless class. `rows` is the trace, where one is used;
    `of_rows`: a replay takes the lengths of its rows, for one class at least.
    """

    def __init__(self, config: WorkloadConfig, rows: TraceRows | None, seed: int, max_model_len: int) -> None:
        classes = config.classes or {"": TrafficClass(share=1.0)}
        self.names = tuple(classes)
        self.classes = tuple(classes.values())
        self.lengths = config.lengths
        self.output_cap = config.output_cap
        self._prompt_scale = config.prompt_scale
        self.max_model_len = max_model_len
        self._by_eos = 1.0 if config.stop is None else config.stop.by_eos
        deadlines_ns = [c.deadline if c.deadline is not None else config.deadline for c in self.classes]
        self._deadlines_ns = np.array([-1 if each is None else each for each in deadlines_ns], np.int64)
        self._priorities = np.array([c.priority for c in self.classes], np.int64)
        self._tenants = () if rows is None else rows.texts.get("tenant", ())
        self._adapters = AdapterDraws.of(config, rows)
        self.adapter_names = self._adapters.names
        self._patience = [c.patience if c.patience is not None else config.patience for c in self.classes]
        self._edges = np.cumsum([c.share or 0.0 for c in self.classes])[:-1]
        self._rows = rows
        self._by_row = config.by_row and rows is not None and "request_class" in rows.labels
        self._seed = seed
        self.of_rows = self.lengths is None and any(c.share and c.lengths is None for c in self.classes)
        self._prefixes = [(name, c.shared_prefix) for name, c in classes.items()]
        if config.shared_prefix is not None:  # of all classes that have none of their own, and the same text for these
            self._prefixes = [(name, own) if own else ("", config.shared_prefix) for name, own in self._prefixes]
        self._items = [(name, c.items) if c.items is not None else ("", config.items) for name, c in classes.items()]
        self._structured = [
            ("", config.structured) if c.structured is None else (name, c.structured) for name, c in classes.items()
        ]
        self.has_items = any(items is not None for _, items in self._items)

    def classes_of(self, size: int, *, user: int = 0, block: int = 0) -> Ints:
        """The class indices of `size` requests, or of as many users or sessions, drawn by the classes' shares."""
        uniform = random_stream(self._seed, "class", user=user, block=block).random(size)
        return np.searchsorted(self._edges, uniform, side="right")

    def draw(
        self,
        size: int,
        *,
        user: int = 0,
        block: int = 0,
        rows: TraceRows | None = None,
        request_class: Ints | None = None,
        sent_ns: Ints | None = None,
    ) -> RequestColumns:
        """`size` requests, the first n being the same for every size.

        `rows` gives the lengths where the config has none; `request_class` the class indices, else they are drawn;
        `sent_ns` the times of sending, where these are known.
        """
        stream = partial(random_stream, self._seed, user=user, block=block)
        if request_class is None:
            if rows is not None and self._by_row:
                request_class = self._classes_of_rows(rows)
            else:
                request_class = self.classes_of(size, user=user, block=block)
        prompt, output, labels = self._lengths(self.lengths, "", request_class, stream, rows, sent_ns)
        for index, (name, traffic) in enumerate(zip(self.names, self.classes, strict=True)):
            if traffic.lengths is not None:
                in_class = request_class == index
                own = self._lengths(traffic.lengths, name, request_class, stream, rows, sent_ns)
                prompt, output = own[0].where(in_class, prompt), own[1].where(in_class, output)
                labels = {key: np.where(in_class, own[2][key], column) for key, column in labels.items()}
        patience_ns = np.full(size, FOR_EVER_NS)
        for index, patience in enumerate(self._patience):
            if patience is not None:
                patience_ns = np.where(request_class == index, _waits(patience, stream("patience"), size), patience_ns)
        if rows is not None and "patience" in rows.labels:  # of measured requests that were given up
            own_ns = rows.labels["patience"]
            patience_ns = np.where(own_ns < 0, patience_ns, own_ns)
        group, group_tokens = self._groups(request_class, stream)
        prompt_tokens, items = prompt.tokens + group_tokens, None
        if self.has_items:
            whole = partial(random_stream, self._seed)
            counted = None if rows is None else rows.labels.get("items")
            items = draw_items(self._items, request_class, prompt_tokens, group_tokens, stream, whole, counted)
            prompt_tokens = prompt_tokens + items.tokens_of
        ignore_eos = np.zeros(size, np.int64)
        if self._by_eos < 1:
            ignore_eos = (stream("stop").random(size) >= self._by_eos).astype(np.int64)
        cut, cap = self._caps(prompt_tokens, output.tokens, ignore_eos)
        return RequestColumns(
            request_class=request_class,
            prompt_tokens=prompt_tokens,
            output_tokens=cut,
            asked_tokens=output.tokens,
            max_output_tokens=cap,
            patience_ns=patience_ns,
            drawn_prompt=prompt.drawn,
            drawn_output=output.drawn,
            group=group,
            group_tokens=group_tokens,
            context_tokens=np.zeros(size, np.int64),
            ignore_eos=ignore_eos,
            items=items,
            **labels | self._adapters.drawn(request_class, stream),
        )

    def _classes_of_rows(self, rows: TraceRows) -> Ints:
        """The class indices of `rows`, which say of which class each is."""
        places = {name: index for index, name in enumerate(self.names)}
        codes = np.array([places.get(name, -1) for name in rows.texts["request_class"]], np.int64)
        return codes[rows.labels["request_class"]]

    @property
    def tells_acceptance(self) -> bool:
        """Whether the trace has an acceptance probability of draft tokens for every request."""
        used = [traffic.lengths or self.lengths for traffic in self.classes if traffic.share]
        return (
            self._rows is not None
            and self._rows.acceptance is not None
            and not any(isinstance(lengths, Lengths | PairLengths | StepLengths | ListLengths) for lengths in used)
        )

    @property
    def shares(self) -> bool:
        """Whether prompts of any class share texts or items."""
        return self.has_items or any(prefix is not None for _, prefix in self._prefixes)

    def _groups(self, request_class: Ints, stream: Stream) -> tuple[Ints, Ints]:
        """The number of each prompt's shared prefix, counted over all classes, and its tokens; -1 and 0 without one."""
        group, tokens = np.full(len(request_class), -1), np.zeros(len(request_class), np.int64)
        first: dict[str, int] = {}
        count = 0
        for index, (name, prefix) in enumerate(self._prefixes):
            if prefix is not None:
                if name not in first:
                    first[name] = count
                    count += prefix.groups
                in_class = request_class == index
                drawn = prefix.drawn(stream(f"prefix/{name}").random(len(request_class)))
                group = np.where(in_class, first[name] + drawn, group)
                tokens = np.where(in_class, prefix.added_tokens, tokens)
        return group, tokens

    def _lengths(
        self,
        lengths: AnyLengths | None,
        name: str,
        request_class: Ints,
        stream: Stream,
        rows: TraceRows | None,
        sent_ns: Ints | None,
    ) -> tuple[DrawnTokens, DrawnTokens, dict[str, Any]]:
        """Prompts, outputs and the columns of RequestColumns that the rows of a trace may tell, by name."""
        size = len(request_class)
        labels: dict[str, Any] = {
            "acceptance": np.full(size, np.nan),
            "priority": self._priorities[request_class],
            "tenant": np.full(size, -1),
            "deadline_ns": self._deadlines_ns[request_class],
            "adapter": np.full(size, -1),
            "constrained": draw_constrained(self._structured, request_class, stream),
        }
        if isinstance(lengths, Lengths):
            return (
                draw_tokens(lengths.prompt, stream(f"prompt/{name}"), size).scaled(self._prompt_scale),
                draw_outputs(lengths, partial(stream, f"output/{name}"), size),
                labels if rows is None else labels | self._labels(rows, labels),
            )
        if isinstance(lengths, PairLengths | StepLengths | ListLengths):
            if isinstance(lengths, ListLengths):
                prompt, output = self._listed(lengths, name, request_class)
            else:
                prompt, output = draw_pairs(lengths, partial(stream, f"pairs/{name}"), size, sent_ns)
            labels = labels if rows is None else labels | self._labels(rows, labels)
            return DrawnTokens(prompt, prompt).scaled(self._prompt_scale), DrawnTokens(output, output), labels
        if lengths is not None:
            assert self._rows is not None, "the config asks for a trace"
            rows = self._rows.picked(self._resampled(stream(f"pairs/{name}").random(size), request_class), None)
        if rows is not None:
            prompt, output = rows.prompt_tokens, rows.output_tokens
            labels |= self._labels(rows, labels)
            if rows.acceptance is not None:
                labels["acceptance"] = rows.acceptance
        else:
            prompt = output = np.ones(size, np.int64)  # every class has lengths of its own and replaces these
        return DrawnTokens(prompt, prompt).scaled(self._prompt_scale), DrawnTokens(output, output), labels

    def _listed(self, lengths: ListLengths, name: str, request_class: Ints) -> tuple[Ints, Ints]:
        """The pairs of a list in order, for the requests that it is of: those of class `name`, or of all classes
        without lengths of their own. ScenarioError where it is too short."""
        whose = [traffic.lengths is lengths if name else traffic.lengths is None for traffic in self.classes]
        at = np.cumsum(np.array(whose)[request_class]) - 1
        if (sent := int(at.max(initial=-1)) + 1) > len(lengths.prompt):
            of = f" of class {name}" if name else ""
            said = f"workload: lengths list {len(lengths.prompt):,} requests{of}, and {sent:,} are sent."
            raise ScenarioError(f"{said} List more, or ask for fewer.")
        return np.array(lengths.prompt)[np.maximum(at, 0)], np.array(lengths.output)[np.maximum(at, 0)]

    def _labels(self, rows: TraceRows, otherwise: dict[str, Any]) -> dict[str, Any]:
        """Priority, tenant and deadline of `rows` as far as these tell them, else as in `otherwise`."""
        names = {"priority": "priority", "tenant": "tenant", "lora": "adapter", "structured": "constrained"}
        labels = {ours: rows.labels[key] for key, ours in names.items() if key in rows.labels}
        if "deadline" in rows.labels:
            own_ns = rows.labels["deadline"]
            labels["deadline_ns"] = np.where(own_ns < 0, otherwise["deadline_ns"], own_ns)
        return labels

    def _resampled(self, uniform: NDArray[np.float64], request_class: Ints) -> Ints:
        """The row of the trace that each of `uniform`, in [0, 1), draws: of its class, where the rows tell theirs."""
        assert self._rows is not None, "the config asks for a trace"
        if not self._by_row:
            return (uniform * len(self._rows)).astype(np.int64)
        of_rows = self._classes_of_rows(self._rows)
        order = np.argsort(of_rows, kind="stable")
        counts = np.bincount(of_rows, minlength=len(self.names))
        start = np.cumsum(counts) - counts
        return order[start[request_class] + (uniform * counts[request_class]).astype(np.int64)]

    def answered(self, asked: Ints) -> Ints:
        """`asked`, output lengths in tokens, cut to a cap in tokens; `max_model_len` cuts none of them."""
        return asked if isinstance(self.output_cap, str) else np.minimum(asked, self.output_cap)

    def with_prompts(self, requests: RequestColumns, prompt: Ints, **shared: Ints) -> RequestColumns:
        """`requests` with prompts of `prompt` tokens, output and cap to fit; the columns `shared` replace theirs."""
        cut, cap = self._caps(prompt, requests.asked_tokens, requests.ignore_eos)
        return replace(requests, prompt_tokens=prompt, output_tokens=cut, max_output_tokens=cap, **shared)

    def _caps(self, prompt: Ints, output: Ints, ignore_eos: Ints) -> tuple[Ints, Ints]:
        """The output cut to what the client and the model allow, and the cap that the client asks for, at least 1; both
        0 of requests that get no token.

        These are one number where the client ignores stop tokens. A prompt that leaves no room is kept: the engine
        rejects it and counts it.
        """
        room = np.maximum(self.max_model_len - prompt, 1)
        if self.output_cap == "exact":
            cut = np.minimum(output, room)
            return cut, cut
        cap = room if self.output_cap == "max_model_len" else np.minimum(room, self.output_cap)
        cut = np.minimum(output, cap)
        return cut, np.where((ignore_eos > 0) | (output == 0), cut, cap)

    def arrival(
        self,
        number: int,
        sent_ns: int,
        arrival_ns: int,
        request_class: int,
        prompt: int,
        output: int,
        cap: int,
        patience_ns: int,
        ignore_eos: int,
        priority: int,
        tenant: int,
        deadline_ns: int,
        adapter: int,
        constrained: int,
        *,
        tokens: TokenIds | None,
        items: tuple[Item, ...] = (),
    ) -> Arrival:
        """The request of these values. Deadline and cancel count from the sending."""
        request = Request(
            id=number,
            arrival_ns=arrival_ns,
            prompt_tokens=prompt,
            max_output_tokens=cap,
            priority=priority,
            request_class=self.names[request_class],
            tenant="" if tenant < 0 else self._tenants[tenant],
            deadline_ns=None if deadline_ns < 0 else sent_ns + deadline_ns,
            tokens=tokens,
            ignore_eos=bool(ignore_eos),
            adapter=adapter,
            items=items,
            constrained=bool(constrained),
        )
        cancel_ns = None if patience_ns == FOR_EVER_NS else sent_ns + patience_ns
        return Arrival(request, output, cancel_ns, None if sent_ns == arrival_ns else sent_ns)

    def mean_output_tokens(self, requests: RequestColumns) -> dict[str, float]:
        """The mean true output in tokens by class name; that of all for a class of which `requests` has none."""
        counts = np.bincount(requests.request_class, minlength=len(self.names))
        totals = np.bincount(requests.request_class, weights=requests.output_tokens, minlength=len(self.names))
        overall = float(requests.output_tokens.mean())
        return {
            name: float(total / count) if count else overall
            for name, total, count in zip(self.names, totals, counts, strict=True)
        }

    def notes(self, requests: RequestColumns, of: str) -> Iterator[str]:
        """A line for everything that changed the lengths asked for; `of` names what they are (`19,366 requests`)."""
        shared = [index for index, traffic in enumerate(self.classes) if traffic.lengths is None]
        groups = [("", self.lengths, np.isin(requests.request_class, shared))]
        for index, (name, traffic) in enumerate(zip(self.names, self.classes, strict=True)):
            if traffic.lengths is not None:
                groups.append((f" of class {name}", traffic.lengths, requests.request_class == index))
        for of_class, lengths, chosen in groups:
            if isinstance(lengths, Lengths) and chosen.any():
                sides = (
                    ("prompt", lengths.prompt, requests.own_tokens, requests.drawn_prompt),
                    ("output", lengths.output, requests.asked_tokens, requests.drawn_output),
                )
                for side, law, tokens, drawn in sides:
                    if share := float((tokens != drawn)[chosen].mean()):
                        asked = law.mean_tokens * (self._prompt_scale if side == "prompt" else 1)
                        yield (
                            f"{side} lengths{of_class}: {two_digits(100 * share)} % clipped to the law's limits; mean"
                            f" {tokens[chosen].mean():,.1f} instead of {drawn[chosen].mean():,.1f}"
                            f" (asked {asked:,.1f})"
                        )
            if isinstance(lengths, ListLengths) and (left := len(lengths.prompt) - int(chosen.sum())) > 0:
                yield f"{left:,} of {len(lengths.prompt):,} listed requests{of_class} are not sent"
        if self._by_eos < 1:
            yield f"{100 * requests.ignore_eos.mean():.3g} % of {of} ignore stop tokens and end by length (stop.by_eos)"
        if requests.items is not None:
            yield requests.items.note(requests.prompt_tokens, of)
        if self._prompt_scale != 1:
            yield f"every prompt {self._prompt_scale:g} times as long (prompt_scale)"
        room = self.max_model_len - requests.prompt_tokens
        yield from self._cap_notes(requests, room, of)

    def _cap_notes(self, requests: RequestColumns, room: Ints, of: str) -> Iterator[str]:
        fits = room >= 1
        cap = self.output_cap
        counts = [(int((~fits).sum()), f"have a prompt of max_model_len {self.max_model_len} or more: to be rejected")]
        by_cap = np.zeros(len(requests), bool)
        if isinstance(cap, int):
            by_cap = fits & (requests.asked_tokens > cap) & (cap <= room)
            lowered = int((fits & (room < cap)).sum())
            counts.append((int(by_cap.sum()), f"have their output cut to output_cap {cap}"))
            counts.append((lowered, f"ask for less than output_cap {cap}: max_model_len - prompt"))
        by_model = fits & (requests.output_tokens < requests.asked_tokens) & ~by_cap
        counts.append((int(by_model.sum()), "have their output cut to max_model_len - prompt"))
        for count, what in counts:
            if count:
                yield f"{count:,} of {of} {what}"
        if cap == "exact":
            yield "reservations know the true length (output_cap: exact)"


def _waits(patience: Patience, rng: np.random.Generator, size: int) -> Ints:
    """How long each client waits at most, in ns, at least 1."""
    if patience.kind == "constant":
        return np.full(size, patience.mean)
    return np.maximum(np.rint(rng.standard_exponential(size) * patience.mean), 1).astype(np.int64)


def mean_lengths(requests: RequestColumns) -> dict[str, float]:
    """The mean prompt and the mean true output, under the names that reports use."""
    return {
        "mean_prompt_tokens": float(requests.prompt_tokens.mean()),
        "mean_output_tokens": float(requests.output_tokens.mean()),
    }
