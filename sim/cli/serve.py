"""`batchsim serve`: an OpenAI-compatible endpoint over a scenario's engines."""

from __future__ import annotations

import json
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from batchsim.base.errors import ScenarioError, shown
from batchsim.base.ranges import INT32_MAX
from batchsim.base.units import counted
from batchsim.cli import complete, option
from batchsim.cli.common import check_out, one_line_errors, read_scenario, require_torch

if TYPE_CHECKING:
    from batchsim.serve.live_engine import LiveEngine


@one_line_errors
def serve(
    scenario: option.Scenario,
    policy: Annotated[
        str | None,
        typer.Option(
            help="A policy's label; may be left out where there is one policy.", autocompletion=complete.policies
        ),
    ] = None,
    engine: Annotated[
        Literal["simulated", "live"], typer.Option(help="What answers: a simulation, or the real model.")
    ] = "simulated",
    device: Annotated[str | None, typer.Option(help="Of a live engine: cpu or cuda; by default cpu.")] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Of a live engine: Hugging Face folder with weights; else random ones.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen at; others than 127.0.0.1 need --api-key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0: any free one.")] = 8000,
    speed: Annotated[float, typer.Option(min=0.001, max=1000, help="Simulated seconds that pass in a second.")] = 1.0,
    model: Annotated[str | None, typer.Option("--served-model-name", help="The model's name to clients.")] = None,
    metrics_names: Annotated[
        Literal["vllm", "sglang"], typer.Option(help="Whose names the metrics at /metrics have.")
    ] = "vllm",
    api_key: Annotated[
        str, typer.Option(envvar="BATCHSIM_API_KEY", help="What clients must show but at /health.")
    ] = "",
    drain_s: Annotated[
        float, typer.Option("--drain", min=0, max=3600, help="Seconds for open requests at the end.")
    ] = 30.0,
    seed: Annotated[
        int, typer.Option(min=0, max=INT32_MAX, help="For the lengths of answers, a router's draws and faults.")
    ] = 0,
    fault: Annotated[
        list[str] | None,
        typer.Option(help="'error p=0.02', 'stall p=0.01 [for=5s]', 'replica=1 at=30s [for=10s]'; may be repeated."),
    ] = None,
    kv_events_config: Annotated[
        str | None,
        typer.Option(help="JSON as vLLM has it: where to publish KV cache events; needs 'batchsim[gateways]'."),
    ] = None,
    out: option.Out = Path("results"),
    set_: option.Set = None,
    traces: option.Traces = None,
    allow_code: option.AllowCode = False,
) -> None:
    """Serve a scenario's engines over HTTP as vLLM does, in real time, without a GPU or on the real model.

    SIGTERM or Ctrl-C ends it: open requests are answered first. Example: batchsim serve my.yaml --policy vllm
    """
    if find_spec("h11") is None:
        raise ScenarioError("batchsim serve: needs h11, which is not installed. pip install 'batchsim[serve]'")
    from batchsim.serve.faults import read_faults
    from batchsim.serve.kv_events_config import read_config

    _check_address(host, api_key, model)
    _check_engine(engine, device, weights, speed)
    kv_events = None if kv_events_config is None else read_config(kv_events_config)
    if kv_events is not None and (find_spec("zmq") is None or find_spec("msgpack") is None):
        raise ScenarioError("--kv-events-config: needs pyzmq and msgpack. pip install 'batchsim[gateways]'")
    if kv_events is not None and engine == "live":
        raise ScenarioError("--kv-events-config: is for simulated engines. Leave it out with --engine live.")
    faults = read_faults(fault or [], seed)
    loaded = faults.failing(read_scenario(scenario, set_, traces, "serve", allow_code=allow_code))
    from batchsim.report.layout import fit  # which with the others takes long to import
    from batchsim.report.text.summary_text import report
    from batchsim.scenario.setup import Setup
    from batchsim.serve.keep_served import keep_served, keep_table
    from batchsim.serve.metrics import Metrics
    from batchsim.serve.realtime import RealtimeSimulation
    from batchsim.serve.run_server import check_address, run_server

    setup = Setup.of(loaded)
    spec = loaded.find(policy or loaded.specs[0].name)
    if policy is None and len(loaded.specs) > 1:
        names = ", ".join(spec.name for spec in loaded.specs)
        raise ScenarioError(
            f"{loaded.source}: has {len(loaded.specs)} policies, an engine runs one. Write --policy and one of {names}."
        )
    check_out(out)
    name = model or setup.model.name
    metrics, made = Metrics(metrics_names, name, setup.max_model_len), None
    backend: RealtimeSimulation | LiveEngine
    if engine == "live":
        from batchsim.cli.serve_live import live_engine, model_folder, text_line

        check_address(host, port)  # now, and not once the model is there
        backend, made = live_engine(setup, spec, metrics, device=device or "cpu", weights=weights, seed=seed)
        text = f"{device or 'cpu'}, weights {made['weights']}{text_line(backend, model_folder(setup, weights))}"
    else:
        backend, text = RealtimeSimulation(setup, spec, metrics, seed), setup.cost_text

    def ready(port: int) -> None:
        base = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        typer.echo(f"{base}/v1  {name}: {spec.name} on {text}", err=True)
        typer.echo(f"try: {_curl(base, name, with_key=bool(api_key))}", err=True)
        if isinstance(backend, RealtimeSimulation) and backend.kv_events is not None:
            typer.echo(_publishers(backend.kv_events.publisher.endpoints), err=True)
        typer.echo(f"metrics: {base}/metrics; all addresses: {base}/; Ctrl-C ends it", err=True)

    end_ns, started_unix_ns = run_server(
        backend,
        host=host,
        port=port,
        speed=speed,
        api_key=api_key,
        faults=faults,
        drain_s=drain_s,
        ready=ready,
        kv_events=kv_events,
    )
    records, spans = backend.close(end_ns)
    if not backend.num_sent:
        errors = f": {faults.num_errors} got an error on demand" if faults.num_errors else ""
        typer.echo(f"no request came to an engine, so there are no results{errors}", err=True)
        return
    has_adapters = backend.setup.scenario.file.lora_cost is not None
    if has_adapters or spec.config.traits.pooling:
        table = keep_table(backend, records, spans, out)
        text = f"{counted(backend.num_sent, 'request')} came to an engine; each with its latencies: {table}"
        what = "a scenario with LoRA adapters" if has_adapters else "a pooling model"
        typer.echo(f"{text}; of {what} there are no other results")
        return
    results = keep_served(
        backend, records, spans, out, started_unix_ns=started_unix_ns, speed=speed, faults=faults, made=made
    )
    typer.echo(report(results))
    if escaped := results.manifest["served"]["escaped"]:
        typer.echo(f"texts that cannot be written stand as escapes, {len(escaped):,}: {', '.join(escaped)[:200]}")
    if faults.num_errors or faults.num_stalls:
        typer.echo(f"on demand: {counted(faults.num_errors, 'error')}, {counted(faults.num_stalls, 'stalled stream')}")
    sent = f"{counted(backend.num_sent, 'request')} came to an engine"
    received = results.path.parent / results.manifest["served"]["received"]
    typer.echo(fit(f"{sent}; {results.path}/  summary.csv; each with its latencies: {received}"))


def _publishers(endpoints: dict[int, tuple[str, str]]) -> str:
    """Where KV events of each replica are published, in a line."""
    sockets = [f"{publish} (replay {replay})" if replay else publish for publish, replay in endpoints.values()]
    return f"KV events: {', '.join(sockets)}"


def _curl(base: str, model: str, *, with_key: bool) -> str:
    """A shell's line that asks the server at `base` for a short completion."""
    body = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 16})
    key = """ -H "Authorization: Bearer $BATCHSIM_API_KEY\"""" if with_key else ""
    return f"curl {base}/v1/completions -H 'content-type: application/json'{key} -d {shlex.quote(body)}"


def _check_address(host: str, api_key: str, model: str | None) -> None:
    """ScenarioError where strangers could use the server, or no client could send the key or the model's name."""
    from batchsim.serve.guard import is_loopback

    if not api_key and not is_loopback(host):
        raise ScenarioError(f"--host {host}: others could use the server. Add --api-key, or listen at 127.0.0.1.")
    if api_key != api_key.strip() or not api_key.isprintable():
        raise ScenarioError(
            "--api-key: has a line break or white space at an end, which no client can send. Remove it."
        )
    if model is not None and not (model.isprintable() and model.strip()):
        raise ScenarioError(f"--served-model-name {shown(model)}: is no name. Write printable letters.")


def _check_engine(engine: str, device: str | None, weights: Path | None, speed: float) -> None:
    """ScenarioError for options that the other engine has, CalibrationError where a live one lacks torch."""
    if engine == "live":
        if speed != 1:
            raise ScenarioError(f"--speed {speed:g}: a model runs as fast as it does. Leave it out with --engine live.")
        require_torch("serve --engine live")
        return
    for name, value in (("device", device), ("weights", weights)):
        if value is not None:
            raise ScenarioError(f"--{name} {value}: a simulated engine has none. Add --engine live, or leave it out.")
