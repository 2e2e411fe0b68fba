"""The experiment on one server, load by load, each left as a file, so that a stopped experiment goes on where it
stopped."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from batchsim.base.errors import MeasuredError
from batchsim.base.files import read_json, write_text
from batchsim.check.measured.read import read_measured
from batchsim.fit.server.client import Client, Dialect, Loaded
from batchsim.fit.server.design import Design, spread
from batchsim.fit.server.loads import Ask, Load
from batchsim.fit.server.offers import COUNTERS, GAUGES, Metrics, Offer, ask_offer, read_metrics
from batchsim.fit.server.prompts import Prompts, hash_ids
from batchsim.fit.server.refusals import RequestError, refused

MOVED = 0.05
"""Share by which a lone answer's time per token may change from the first half to the second; beyond, it moved."""
LOOK_S = 0.5
"""Seconds between looks at the server's metrics."""
_VOCABULARIES = ((1000, 30_000), (300, 2000), (20, 200))
"""Token ids that prompts are drawn from, the first that the server takes."""
_PROBE = Ask(None, 16, 16)

Say = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Experiment:
    """What is known once a server was measured: its `offer`, the files of the `given` loads and of those `held` out,
    loads that the client was too late for (`void`), how many requests of a load `waited` for one in flight to end, and
    by which share a lone answer's time per token `moved` from the first half of the experiment to the second."""

    offer: Offer
    given: tuple[Path, ...]
    held: tuple[Path, ...]
    void: tuple[str, ...]
    waited: Mapping[str, int]
    moved: float

    @property
    def notes(self) -> list[str]:
        """What is to be known of the measurement, a line each."""
        notes = [f"{name}: left out: this machine sent it late, twice. Nothing is wrong with the server"
                 for name in self.void]  # fmt: skip
        notes += [f"{name}: {count:,} requests waited at the client for one of --max-concurrency to end"
                  for name, count in self.waited.items()]  # fmt: skip
        if abs(self.moved) > MOVED:
            notes.append(
                f"a lone answer's time per token moved by {100 * self.moved:+.1f} % from the first half to the"
                " second: server or machine was disturbed, and nothing below is judged"
            )
        return notes


def moved_by(idle_s: Sequence[float]) -> float:
    """The share by which the median of the later half of the readings, in order of time, is above that of the rest."""
    half = len(idle_s) // 2
    return statistics.median(idle_s[half:]) / statistics.median(idle_s[:half]) - 1


@dataclass(frozen=True)
class _Course:
    """What every load of an experiment is sent with: how requests are written, and what lone answers come before it."""

    dialect: Dialect
    sentinel: Load


class Runner:
    """Measures the server of `client` into `folder`, within `seconds` and `max_requests`. `say` is called with lines of
    progress; `fewest_users` is the design's."""

    def __init__(
        self,
        client: Client,
        folder: Path,
        seconds: float,
        max_requests: int,
        max_model_len: int | None,
        say: Say,
        fewest_users: int = 2,
    ) -> None:
        self.client, self.folder, self.seconds, self.max_requests = client, folder, seconds, max_requests
        self._max_model_len, self._say, self._fewest_users = max_model_len, say, fewest_users
        self._journal: dict[str, Any] = {"loads": {}, "sent": 0}
        self._done = 0
        self._idle_s: list[float] = []  # lone answers' times per token, by when they came
        self._begun_s = time.monotonic()

    async def run(self, model: str | None, check: Callable[[Offer], None] = lambda _: None) -> Experiment:
        """The whole experiment; what a former call has measured is not measured again. `check` is shown what the server
        offers before it is asked for anything, and may raise.

        MeasuredError where the server fails, or is another one than before; files of loads that were done stay.
        """
        offer = await ask_offer(self.client, model)
        check(offer)
        known = [n for n in (self._max_model_len, offer.max_model_len) if n is not None]
        if not known:
            raise MeasuredError(
                f"{self.client.url}: does not say how long requests may be. Give a --scenario that does."
            )
        self._resume(offer)
        dialect, token_s = await self._probe(offer)
        self._journal["token_s"] = token_s = self._journal.get("token_s", token_s)
        self._keep()
        design = Design(self.seconds, self.client.max_concurrency, min(known), token_s, self._fewest_users)
        files: dict[str, list[Path]] = {"given": [], "held": []}
        course = _Course(dialect, design.sentinel)
        for load in design.singles():
            files["given"].append(path := await self._measure(load, "given", course))
            (run,) = read_measured(path)
            if load.prompt[1] >= 256 and run.figures["ttft_mean_s"] > load.seconds / 2:
                break  # four times the prompt would take more than all of its time
        full_rps: dict[str, float] = {}
        for load in design.full():
            files["given"].append(path := await self._measure(load, "given", course))
            users = min(load.users, self.client.max_concurrency)  # by Little's law: not all were there all the time
            full_rps[load.name.removeprefix("full-")] = users / read_measured(path)[0].figures["e2e_mean_s"]
        for kind, load in spread([*(("given", load) for load in design.closed()), *design.rates(full_rps)]):
            files[kind].append(await self._measure(load, kind, course))
        await self._lone("end", course)
        void = {name for name, row in self._journal["loads"].items() if row["void"]}
        given, held = ([path for path in files[kind] if path.stem not in void] for kind in ("given", "held"))
        self._journal["moved"] = moved = moved_by(self._idle_s)
        self._keep()
        waited = {name: row["held_back"] for name, row in self._journal["loads"].items() if row["held_back"]}
        return Experiment(offer, tuple(given), tuple(held), tuple(sorted(void)), waited, moved)

    async def _measure(self, load: Load, kind: str, course: _Course) -> Path:
        """The file of a load, measured now, after a few lone answers, unless it is there."""
        await self._lone(load.name, course)
        return await self._file(load, kind, course.dialect)

    async def _lone(self, before: str, course: _Course) -> None:
        """Takes the times per token of the lone answers before a load: what the machine does meanwhile moves these."""
        lone = replace(course.sentinel, name=f"sentinel-{before}", seed=len(self._idle_s))
        (run,) = read_measured(await self._file(lone, "sentinel", course.dialect))
        assert run.requests is not None, "the file has them one by one"
        self._idle_s += run.requests.latency_s("tpot").tolist()

    async def _file(self, load: Load, kind: str, dialect: Dialect) -> Path:
        """The file of a load, measured now unless it is there. Measured again, once, where this machine was late."""
        path = self.folder / kind / f"{load.name}.csv"
        self._done += 1
        entry = self._journal["loads"].get(load.name)
        if entry is not None and path.exists() and not entry["void"]:
            return path
        left_s = max(self.seconds - (time.monotonic() - self._begun_s), 0)
        self._say(self._done, 0, f"{load.name}, {left_s / 60:.1f} min left")
        for again in (False, True):
            loaded, seen = await self._send(load, dialect)
            if not loaded.void or again:
                break
        if loaded.void:  # where no folder of runs to fit is
            path = self.folder / "void" / path.name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, tidy(loaded, self.client.max_concurrency))
        self._journal["loads"][load.name] = {
            "kind": kind,
            "load": asdict(load),
            "requests": len(loaded.answers),
            "held_back": loaded.held,
            "late": loaded.late,
            "void": loaded.void,
            "metrics": seen,
        }
        self._keep()
        return path

    async def _send(self, load: Load, dialect: Dialect) -> tuple[Loaded, dict[str, float]]:
        """The answers to a load, and what the server's metrics said meanwhile. MeasuredError where it fails, or is cut
        by the budget of requests."""
        left = self.max_requests - self._journal["sent"]
        cut = load.most is None or left < load.most
        loaded, samples = Loaded(replace(load, most=left) if cut else load), list[Metrics]()
        start = await read_metrics(self.client)

        async def look() -> None:
            while start is not None:
                await asyncio.sleep(LOOK_S)
                if (metrics := await read_metrics(self.client)) is not None:
                    samples.append(metrics)

        looking = asyncio.create_task(look())
        try:
            if left > 0:
                await self.client.send(loaded.load, dialect, loaded)
        finally:
            looking.cancel()
            self._journal["sent"] += len(loaded.answers) + (loaded.failure is not None)
            self._keep()
        if loaded.failure is not None:
            self._keep_partial(load, loaded)
            raise refused(f"{load.name}: {len(loaded.answers):,} answers came, then", loaded.failure)
        if cut and len(loaded.answers) >= left:
            self._keep_partial(load, loaded)
            raise MeasuredError(
                f"{load.name}: {self._journal['sent']:,} requests were sent, and --max-requests is"
                f" {self.max_requests:,}. Raise it: the same command goes on."
            )
        end = await read_metrics(self.client) if start is not None else None
        return loaded, _seen(start, samples, end)

    def _keep_partial(self, load: Load, loaded: Loaded) -> None:
        if loaded.answers:
            path = self.folder / "failed" / f"{load.name}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, tidy(loaded, self.client.max_concurrency))

    def _resume(self, offer: Offer) -> None:
        """Takes up the journal of a former call. MeasuredError where that was of another server or experiment."""
        path = self.folder / "experiment.json"
        inputs = {
            "url": self.client.url,
            "model": offer.model,
            "version": offer.version,
            "max_concurrency": self.client.max_concurrency,
            "seconds": self.seconds,
        }
        if path.exists():
            try:
                journal = read_json(path)
                before = {name: journal[name] for name in inputs}
                assert isinstance(journal["loads"], dict) and type(journal["sent"]) is int
            except (ValueError, KeyError, TypeError, AssertionError) as error:
                raise MeasuredError(f"{path}: is no experiment ({error!r}). Remove its folder.") from None
            for name, value in inputs.items():
                if before[name] != value:
                    raise MeasuredError(
                        f"{path}: of an experiment with {name} {before[name]!r}, now it is {value!r}. Say the same to"
                        " go on, or give -o another name."
                    )
            self._journal = journal
            return
        self._journal = {**inputs, "engine": offer.engine, "sent": 0, "loads": {}}
        if offer.metrics is not None and offer.metrics.cache:
            self._journal["cache"] = dict(offer.metrics.cache)

    def _keep(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / "experiment.json", json.dumps(self._journal, indent=1) + "\n")

    async def _probe(self, offer: Offer) -> tuple[Dialect, float]:
        """The dialect that the server understands, and the seconds of a token in a lone answer."""
        tried = [Dialect(offer.model, Prompts(low, high), token_ids) for low, high in _VOCABULARIES
                 for token_ids in (True, False)]  # fmt: skip
        tried.append(Dialect(offer.model, Prompts(ids=False), token_ids=False))
        last: RequestError | None = None
        for dialect in tried:
            try:
                await self.client.answer(_PROBE, dialect, 0, 0, time.monotonic())
                start_s = time.monotonic()
                answer = await self.client.answer(_PROBE, dialect, 1, 0, start_s)
                if not dialect.prompts.ids:
                    each = answer.prompt_tokens / _PROBE.prompt_tokens
                    dialect = replace(dialect, prompts=replace(dialect.prompts, tokens_per_word=each))
                return dialect, max(answer.last_s - answer.first_s, 1e-6) / (answer.output_tokens - 1)
            except RequestError as failed:
                if failed.status not in (400, 422):  # all others would be the same however it is asked
                    raise refused("a first request", failed) from None
                last = failed
        assert last is not None, "something was tried"
        raise refused("a first request", last)


def tidy(loaded: Loaded, max_concurrency: int) -> str:
    """The answers as a CSV that `read_measured` reads, in the order of sending; `users` are those of a closed loop."""
    rows = sorted(loaded.answers, key=lambda one: (one.sent_s, one.number))
    load = loaded.load
    timed, shares = load.rate_rps is not None, load.shared > 0
    names = ["intended_s"] if timed else ["users"]
    names += ["sent_s", "first_token_s", "last_token_s", "prompt_tokens", "output_tokens", "chunks"]
    lines = [",".join([*names, *(["hash_ids"] if shares else [])])]
    for one in rows:
        fields = [f"{one.due_s:.6f}" if timed else str(min(load.users, max_concurrency))]
        fields += [f"{time_s:.6f}" for time_s in (one.sent_s, one.first_s, one.last_s)]
        fields += map(str, (one.prompt_tokens, one.output_tokens, one.chunks))
        if shares:
            fields.append(f'"{hash_ids(one.ask, one.number, one.prompt_tokens)}"')
        lines.append(",".join(fields))
    return "\n".join(lines) + "\n"


def _seen(start: Metrics | None, samples: list[Metrics], end: Metrics | None) -> dict[str, float]:
    """Mean and most of the gauges, and by how much the counters grew."""
    if start is None or end is None:
        return {}
    seen: dict[str, float] = {}
    looks = [one.known(GAUGES) for one in samples]
    for name in GAUGES:
        if values := [look[name] for look in looks if name in look]:
            seen |= {f"{name}_mean": statistics.fmean(values), f"{name}_max": max(values)}
    before, after = start.known(COUNTERS), end.known(COUNTERS)
    return seen | {name: after[name] - before[name] for name in after if name in before}
