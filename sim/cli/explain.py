"""`batchsim explain`: why requests were slow or missed their objective, and what would have helped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchsim.base.errors import ScenarioError
from batchsim.base.files import replacing_text, writing
from batchsim.base.ranges import INT32_MAX
from batchsim.cli import option
from batchsim.cli.common import check_output, one_line_errors, print_json, read_results

if TYPE_CHECKING:
    from batchsim.results.read import Results

PICTURE = "slo_causes.png"


@one_line_errors
def explain(
    results: option.Results,
    request: Annotated[
        int | None, typer.Option(help="Tell the life of the request with this number, under every policy.")
    ] = None,
    slo: Annotated[bool, typer.Option("--slo", help="Count the causes of all SLO misses, and draw them.")] = False,
    policy: Annotated[str | None, typer.Option(help="A policy's label; all by default.")] = None,
    load: Annotated[float | None, typer.Option(help="A tested load; the one of the table by default.")] = None,
    seed: Annotated[int | None, typer.Option(help="Which repetition; --slo takes all by default, else 0.")] = None,
    slowest: Annotated[
        int | None, typer.Option(min=0, max=INT32_MAX, help="How many of the slowest requests; 5 by default.")
    ] = None,
    by: Annotated[
        str | None, typer.Option(metavar="LATENCY", help="Slowest by ttft, tpot, e2e, queue_time or norm_latency.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--counterfactual", metavar="KEY=VALUE", help="Simulate again with this change, like kv.tokens=+20%."
        ),
    ] = None,
    traces: Annotated[
        Path | None,
        typer.Option(envvar="BATCHSIM_TRACES", help="Folder where --counterfactual looks for traces too."),
    ] = None,
    audit: Annotated[
        Path | None, typer.Option(help="Write here who was delayed in favour of whom, as JSON lines.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help=f"The picture of --slo; by default {PICTURE} in RESULTS.")
    ] = None,
    allow_code: option.AllowCode = False,
    as_json: option.Json = False,
) -> None:
    """Show why requests were slow: the parts of their lives, largest first, and the mean over all.

    Examples: batchsim explain results/bursty --policy continuous --slowest 3 --by ttft; batchsim explain
    results/bursty --request 774; batchsim explain results/bursty --slo; batchsim explain results/bursty
    --policy continuous --counterfactual kv.tokens=+20%
    """
    from batchsim.api.results import explained_at

    if traces is not None and not traces.is_dir():
        raise ScenarioError(f"{traces}: no such folder to look for traces in. Correct --traces, or leave it out.")
    loaded = read_results(results)
    load, chosen = explained_at(loaded, policy, load)
    if output is not None and not slo:
        raise ScenarioError("--output: is for the picture of --slo alone. Drop it, or add --slo.")
    if audit is not None and as_json:
        raise ScenarioError("--json: the log of --audit is JSON lines already. Drop it.")
    given = {"--slowest": slowest is not None or by is not None, "--request": request is not None, "--slo": slo}
    given |= {"--counterfactual": bool(changes), "--audit": audit is not None}
    modes = [name for name, asked in given.items() if asked]
    if len(modes) > 1:
        raise ScenarioError(f"{' and '.join(modes)}: each tells something else. Give one of them.")
    _check_latency(by)
    if slo:
        _slo(loaded, chosen, load, seed, output, as_json)
    elif audit is not None:
        _audit(loaded, chosen, load, seed or 0, audit)
    elif changes:
        folders = [Path.cwd(), *([traces] if traces else [])]
        _counterfactual(loaded, chosen, load, seed or 0, changes, folders, allow_code, as_json)
    elif request is not None:
        _story(loaded, chosen, load, seed or 0, request, as_json)
    else:
        _overview(loaded, chosen, load, seed or 0, 5 if slowest is None else slowest, by, as_json)


def _print(answers: list[dict[str, Any]], text: str, as_json: bool) -> None:
    if as_json:
        print_json(answers)
    else:
        typer.echo(text)


def _check_latency(name: str | None) -> None:
    from batchsim.metrics.latencies import LATENCIES

    known = [each for each, latency in LATENCIES.items() if latency.of is not None]
    if name is not None and name not in known:
        raise ScenarioError(f"--by {name}: is no latency of a request. Write one of {', '.join(known)}.")


def _overview(
    results: Results, policies: list[str], load: float, seed: int, slowest: int, by: str | None, as_json: bool
) -> None:
    from batchsim.report.text.attribution_text import overview, overview_text

    overviews = [overview(results, name, load, seed, slowest=slowest, by=by) for name in policies]
    _print(overviews, "\n".join(overview_text(results, one) for one in overviews), as_json)


def _story(results: Results, policies: list[str], load: float, seed: int, request: int, as_json: bool) -> None:
    from batchsim.report.text.story_text import story, story_text

    stories = [story(results, name, load, seed, request) for name in policies]
    _print(stories, "\n\n".join(story_text(results, one) for one in stories), as_json)


def _slo(
    results: Results, policies: list[str], load: float, seed: int | None, output: Path | None, as_json: bool
) -> None:
    from batchsim.report.pictures.causes_picture import KIND, causes_picture
    from batchsim.report.text.causes_text import causes, causes_text

    seeds = sorted({int(number) for number in results.points["seed"]}) if seed is None else [seed]
    path = results.path / PICTURE if output is None else output
    check_output(path, KIND)
    by_policy = causes(results, policies, load, seeds)
    with writing(path, "Give another path with -o."):
        causes_picture(results, by_policy, load, len(seeds), path)
    _print(by_policy, f"{causes_text(results, by_policy, load, len(seeds))}\n{path}", as_json)


def _counterfactual(
    results: Results,
    policies: list[str],
    load: float,
    seed: int,
    changes: list[str],
    folders: list[Path],
    allow_code: bool,
    as_json: bool,
) -> None:
    from batchsim.explain.counterfactual import check_changes, counterfactual
    from batchsim.report.text.counterfactual_text import counterfactual_data, counterfactual_text
    from batchsim.results.read import varied

    named = check_changes(changes)
    labels = {str(name): (varied(results, name) or {"policy": name})["policy"] for name in results.points["policy"]}
    if not named <= set(labels.values()):
        known = ", ".join(dict.fromkeys(labels.values()))
        raise ScenarioError(f"{results.path}: has no policy {', '.join(named)}. Write one of {known}.")
    chosen = [name for name in policies if labels[name] in named] if named else policies
    if not chosen:
        raise ScenarioError(f"--policy {policies[0]}: the change is of {', '.join(named)}. Write that one, or none.")
    comparisons = []
    for name in chosen:
        each = counterfactual(results, name, load, seed, changes, folders=folders, allow_code=allow_code)
        comparisons.append(counterfactual_data(each) | {"policy": name})
    _print(comparisons, "\n\n".join(counterfactual_text(results, one) for one in comparisons), as_json)


def _audit(results: Results, policies: list[str], load: float, seed: int, path: Path) -> None:
    from batchsim.explain.audit import KIND, audit_log

    live = bool(results.manifest.get("live"))
    count = 0
    with writing(path), replacing_text(path, KIND) as file:
        for name in policies:
            about = {"scenario": results.manifest["scenario_name"], "policy": name, "load": load, "seed": seed}
            for line in audit_log(results.records(name, load, seed), **about, live=live):
                file.write(line + "\n")
                count += 1
    count -= len(policies)  # headers
    typer.echo(f"{path}   {count:,} event{'' if count == 1 else 's'}")
