"""`batchsim calibrate --url`: what an engine's steps cost, from an experiment on a server that runs it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from batchsim.base.errors import CalibrationError, MeasuredError, ScenarioError
from batchsim.cli.bench import FitOptions, calibrate_bench
from batchsim.cli.common import progress_bar

if TYPE_CHECKING:
    from batchsim.fit.server.experiment import Experiment
    from batchsim.fit.server.offers import Offer
    from batchsim.scenario.config import PolicySpec, Scenario
    from batchsim.scenario.setup import Setup

LEAST_S = 20.0
MOST_USERS = 256


def calibrate_url(
    options: FitOptions,
    url: str,
    *,
    model: str | None,
    minutes: float,
    max_concurrency: int | None,
    max_requests: int,
    log: Path | None,
    api_key: str,
    yes: bool,
) -> None:
    """Measures the server at `url` into a folder beside the file to write, and fits the engine of the scenario to
    that; without a scenario the files are all. A stopped call goes on when it is given again."""
    import asyncio

    try:
        from batchsim.fit.server.experiment import Runner
    except ModuleNotFoundError as error:
        raise CalibrationError(
            f"calibrate --url: needs {error.name}, which is not installed. Run pip install 'batchsim[server]'."
        ) from None
    from batchsim.fit.server.address import Address
    from batchsim.fit.server.client import Client
    from batchsim.scenario.setup import Setup

    if not (math.isfinite(minutes) and minutes * 60 >= LEAST_S):
        raise CalibrationError(f"--minutes {minutes:g}: an experiment takes {LEAST_S / 60:.2g} at least. Give more.")
    if log is not None and options.scenario is None:
        raise ScenarioError("--log: is read with the scenario, whose KV it says. Add --scenario.")
    out = options.path("--url")
    address = Address.of(url)
    if not address.private and not yes:
        raise MeasuredError(
            f"--url {address.url}: is no loopback or private address, and the experiment puts as much load on it as it"
            " bears. Add --yes if it is yours."
        )
    if log is not None:
        options = replace(options, set_=[*(options.set_ or []), f"kv={{log: {json.dumps(str(log))}}}"])
    setup = spec = None
    if options.scenario is not None:
        loaded = options.load("--url")
        setup, spec = Setup.of(loaded), the_policy(loaded, options.policy)
    seqs = spec.config.traits.max_num_seqs if spec is not None else None
    most = max_concurrency or min(2 * seqs if seqs else 64, MOST_USERS)
    # Few users of an engine that splits steps say nothing: the fit leaves them out.
    fewest = seqs if seqs and spec is not None and spec.config.traits.splits_steps else 2
    folder = out.with_suffix("")

    def check(offer: Offer) -> None:
        if setup is not None and spec is not None and not options.force:
            check_told(offer, setup, spec)

    async def measure() -> Experiment:
        async with Client(address.url, most, api_key) as client:
            longest = None if setup is None else setup.max_model_len
            runner = Runner(client, folder, minutes * 60, max_requests, longest, say, fewest)
            return await runner.run(model, check)

    with progress_bar() as say:
        try:
            experiment = asyncio.run(measure())
        except KeyboardInterrupt:
            typer.echo(f"{folder}: stopped; what is done is kept. The same command goes on.", err=True)
            raise typer.Exit(130) from None
        except MeasuredError as error:
            kept = f" {folder} keeps what is done; the same command goes on." if (folder / "given").exists() else ""
            raise MeasuredError(f"{error}{kept}") from None
    if setup is None or spec is None:
        for note in experiment.notes:
            typer.echo(note, err=True)
        typer.echo(
            f"{folder}/given, {folder}/held: fit them with batchsim calibrate --bench {folder}/given --hold-out"
            f" {folder}/held --scenario SCENARIO -o {out}, where SCENARIO says engine, model and KV"
        )
        return
    calibrate_bench(options, experiment.given, [], [str(path) for path in experiment.held], experiment.notes)


def the_policy(scenario: Scenario, label: str | None) -> PolicySpec:
    """The policy of that label, or the only one. ScenarioError where there is none, or several."""
    specs = [spec for spec in scenario.specs if label in (None, spec.name, spec.label)]
    if len(specs) != 1:
        names = ", ".join(spec.name for spec in scenario.specs)
        raise ScenarioError(f"{scenario.source}: a server has one policy, of {names}. Say which with --policy.")
    return specs[0]


def check_told(offer: Offer, setup: Setup, spec: PolicySpec) -> None:
    """ScenarioError where the scenario says otherwise than the server itself; --force goes on all the same."""
    cache = offer.metrics.cache if offer.metrics is not None else {}
    policy, place = spec.config, setup.scenario.source
    pairs: list[tuple[str, object, object]] = []
    if cache.get("num_gpu_blocks", "").isdigit() and cache.get("block_size") == str(setup.kv.block_size):
        pairs.append(("KV blocks", int(cache["num_gpu_blocks"]), setup.kv.num_blocks))
    if cache.get("enable_prefix_caching") in ("True", "False"):
        pairs.append(("prefix caching", cache["enable_prefix_caching"] == "True", bool(policy.traits.prefix_cache)))
    for what, theirs, ours in pairs:
        if theirs != ours:
            raise ScenarioError(
                f"{place}: {what} {ours}, but the server says {theirs}. Correct the scenario, or add --force."
            )
