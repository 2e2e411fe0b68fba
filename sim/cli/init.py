"""`batchsim init` and `batchsim show`: a scenario to start from, of the user's own command line too, and that back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchsim.base.errors import CalibrationError, ScenarioError
from batchsim.base.files import ANY, Kind, write_text, writing
from batchsim.cli import complete, option
from batchsim.cli.common import check_output, one_line_errors, read_scenario
from batchsim.cli.traces import options_advised, trace_config

if TYPE_CHECKING:
    from batchsim.scenario.command_lines.flags import Keys
    from batchsim.scenario.command_lines.lines import Read

SCHEMA = "batchsim.schema.json"
"""The file beside a scenario that describes it. A file, since an editor finds it without a network, and it is of the
very version that wrote it; an address would be of another one some day."""
_SCHEMA = Kind("schema of a scenario", rb'\{\n "\$schema": "[^"]*",\n "title": "batchsim scenario"')
_MODELINE = f"# yaml-language-server: $schema={SCHEMA}"
_MODEL, _GPU = "llama-3.1-8b", "h200"
_Degree = Annotated[int | None, typer.Option(min=1, max=1024, help="GPUs that share every layer.")]
_Stages = Annotated[int | None, typer.Option(min=1, max=1024, help="Pipeline stages.")]
_Experts = Annotated[int | None, typer.Option(min=1, max=1024, help="GPUs over which experts are spread.")]
_Weights = Annotated[str | None, typer.Option(metavar="TYPE", help="Type of the weights, such as fp8.")]
_Kv = Annotated[str | None, typer.Option("--kv", metavar="TYPE", help="Type of the KV cache, such as fp8.")]
_Line = Annotated[str | None, typer.Option(metavar="COMMAND", help="The command that starts the server, in quotes.")]


@one_line_errors
def init(
    trace: Annotated[Path | None, typer.Option(help="Replay this trace instead of Poisson arrivals.")] = None,
    format_: option.Format = "auto",
    columns: option.Columns = None,
    time_unit: option.TimeUnit = None,
    set_: option.TraceSet = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Catalog name, Hugging Face id, or path of a config.json.",
            show_default=_MODEL,
            autocompletion=complete.models,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Catalog name of the GPU.", show_default=_GPU, autocompletion=complete.gpus),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Write a deployment of vllm, the default with the next five, of sglang or tensorrt_llm.",
            autocompletion=complete.engines,
        ),
    ] = None,
    tp: _Degree = None,
    pp: _Stages = None,
    ep: _Experts = None,
    weights: _Weights = None,
    kv: _Kv = None,
    from_vllm: _Line = None,
    from_sglang: _Line = None,
    from_trtllm: _Line = None,
    plan: Annotated[bool, typer.Option("--plan", help="Add a plan, for batchsim plan: how many GPUs?")] = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("scenario.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
    schema: Annotated[
        bool, typer.Option("--schema/--no-schema", help="Whether to write the JSON schema for editors beside it.")
    ] = True,
) -> None:
    """Write a commented scenario that runs, and beside it the JSON schema that its first line names for editors.

    Example: batchsim init --from-vllm "vllm serve meta-llama/Llama-3.1-70B -tp 4 --kv-cache-dtype fp8" --gpu h100_sxm
    """
    from batchsim.cli.starter import deployed_text, planned_text, starter_text
    from batchsim.scenario.command_lines.engines import of_checkpoint
    from batchsim.workload.traces.inspect import inspect_trace

    if output.exists() and not force:
        raise ScenarioError(f"{output}: is there already. Write another with -o, or replace it with --force.")
    check_output(output, ANY)
    beside = output.parent / SCHEMA
    if schema and beside == output:
        raise ScenarioError(f"{output}: is the name of the schema beside a scenario. Write another with -o.")
    if schema:
        check_output(beside, _SCHEMA, "Leave it out with --no-schema.")
    config = None if trace is None else trace_config(trace, format_, columns, time_unit, set_)
    if config is None and (columns or time_unit or set_ or format_ != "auto"):
        raise ScenarioError("init: --columns, --time-unit, --format and --set describe a trace. Name it with --trace.")
    lines = {"vllm": from_vllm, "sglang": from_sglang, "tensorrt_llm": from_trtllm}
    options = {"tp": tp, "pp": pp, "ep": ep, "weights": weights, "kv": kv}
    stated = {f"deployment.{name}": value for name, value in options.items() if value is not None}
    read = _read_line({name: line for name, line in lines.items() if line is not None}, engine, stated)
    deployed = read or (_of_options(engine or "vllm", model or _MODEL, stated) if engine or stated else None)
    with options_advised():
        figures = None if config is None else inspect_trace(config, Path())
    if deployed is None:
        text = starter_text(model or _MODEL, gpu or _GPU, output.parent, config, figures)
    else:
        deployed = of_checkpoint(deployed, model or deployed.keys["model"])
        text = deployed_text(deployed.keys, deployed.engine, gpu or _GPU, output.parent, config, figures)
        _check(text, output.parent)
        _tell(deployed)
        if read and gpu is None:
            typer.echo(f"! no command names the GPU: {_GPU}. Name yours with --gpu.", err=True)
        if read and (other := read.keys["model"]) != deployed.keys["model"]:
            typer.echo(f"! --model {model} in the place of the command's {other}", err=True)
    if plan:
        arrivals = None if figures is None else figures["arrivals"]
        text = planned_text(text, None if arrivals is None else arrivals["span_s"])
        _check(text, output.parent)
    with writing(output, "Give another path with -o."):
        write_text(output, f"{_MODELINE}\n{text}" if schema else text, ANY)
    if schema:
        from batchsim.scenario.schema import schema_text

        with writing(beside, "Leave it out with --no-schema."):
            write_text(beside, schema_text(), _SCHEMA)
    typer.echo(f"{output}   next: batchsim {'plan' if plan else 'run'} {output}")


def _read_line(lines: dict[str, str], engine: str | None, stated: Keys) -> Read | None:
    """What the one command line among `lines`, by engine, says; None without one. `stated` are keys of options."""
    from batchsim.scenario.command_lines.engines import read_command

    if not lines:
        return None
    if len(lines) > 1 or engine is not None or stated:
        others = "".join(f", --{key.rpartition('.')[2]}" for key in stated)
        raise ScenarioError(
            "init: --from-vllm, --from-sglang and --from-trtllm say all of engine and GPUs. Give one of them"
            f"{f', without {others[2:]}' if others else ''}."
        )
    ((name, line),) = lines.items()
    return read_command(line, name)


def _of_options(engine: str, model: str, stated: Keys) -> Read:
    from batchsim.base.errors import nearest
    from batchsim.scenario.command_lines.engines import SERVERS
    from batchsim.scenario.command_lines.lines import Read

    if engine not in SERVERS:
        raise ScenarioError(f"--engine {engine}: is not known. {nearest(engine, SERVERS)}")
    return Read(engine, {"model": model, **stated})


def _check(text: str, folder: Path) -> None:
    """Raises the error of the scenario `text`, if it has one; missing step times are only reported."""
    from batchsim.scenario.parse import parse_scenario
    from batchsim.scenario.setup import Setup

    try:
        Setup.of(parse_scenario(text, "init", folder))
    except CalibrationError as error:
        typer.echo(f"! {error}", err=True)


def _tell(read: Read) -> None:
    from batchsim.scenario.command_lines.flags import SAME, UNTOLD

    for mark, what, words in (("-", SAME, read.same), ("!", UNTOLD, read.untold)):
        if words:
            typer.echo(f"{mark} {what}: {', '.join(words)}", err=True)


@one_line_errors
def show(scenario: option.Scenario, set_: option.Set = None, as_json: option.Json = False) -> None:
    """Show a scenario's deployment, its KV memory, its policies' knobs, and the command that starts such an engine.

    Example: batchsim show my.yaml --set deployment.tp=8
    """
    from batchsim.cli.common import print_json
    from batchsim.report.text.deployment_text import shown_deployment

    deployment = shown_deployment(read_scenario(scenario, set_, None, "show", allow_code=False))
    if as_json:
        print_json(deployment.plain())
        return
    typer.echo(deployment)
