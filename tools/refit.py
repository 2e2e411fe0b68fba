"""Fits a profile anew to the raw measurements that a calibration left, on any machine that has torch.

    python -m tools.refit DIR/profile.partial.json -o PROFILE.json [--also DIR/runs/live-....npz]

The measurements lie beside a profile that still lacks something. The new profile is of the same steps and engine runs,
fitted by this version's code, which the profile names as `fitted_by`, with the day as `fitted_on`. Live runs given by
--also count as runs to fit on: what an engine adds to its kernels is then what it adds while requests come and end as
in service. They may not be among those by which the profile is judged; their names stand in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from batchsim.base.errors import CalibrationError
from batchsim.base.files import read_json, reason_text, write_text, writing
from batchsim.base.plain import from_plain, to_plain
from batchsim.calibrate.engine.graphs import buckets_for
from batchsim.calibrate.engine.identity import source_commit
from batchsim.calibrate.engine.session import digest_of, load_result
from batchsim.calibrate.profile.assemble import assemble
from batchsim.calibrate.profile.engine_runs import EngineSteps, RunSpec, steps_of
from batchsim.calibrate.profile.job import job_of
from batchsim.calibrate.profile.options import LEAST_MINUTES, Options, limits_of
from batchsim.calibrate.profile.raw import Raw, check_key
from batchsim.cli.common import one_line_errors
from batchsim.deployment.catalog import load_model
from batchsim.deployment.model import ModelSpec

_ADVICE = "Leave it out."


def refit(path: Path, out: Path, also: Sequence[Path] = ()) -> None:
    """Writes to `out` the profile fitted to the measurements in the file at `path`, and to the live runs `also`.

    CalibrationError if there are none, or a live run is of another machine or model, was cut or is there twice, or
    `out` cannot be written; ScenarioError if a live run cannot be read.
    """
    try:
        key = read_json(path)["key"]
        options = from_plain(Options, {"minutes": LEAST_MINUTES, "name": None} | key["options"], "options")
        if options.device not in ("cpu", "cuda") or key["hardware"]["device"] != options.device or not key["software"]:
            raise ValueError("its machine is not that of its options")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CalibrationError(f"{path}: cannot be read as measurements: {reason_text(error)}.") from None
    raw, model = Raw.load(path, key), load_model(options.model)
    fitted = dict[str, str]()
    for file in also:
        raw.runs.append(_run_of(file, key, model, options))
        if (digest := digest_of(file)) in fitted:
            raise CalibrationError(f"--also {file}: is the same run as {fitted[digest]}. Give each live run once.")
        fitted[digest] = file.name
    limits = limits_of(options, model)
    if not limits.kv_tokens:
        if raw.num_blocks is None:
            raise CalibrationError(f"{path}: its calibration was cut before it knew the KV memory. Let it go on there.")
        limits = replace(limits, kv_tokens=raw.num_blocks * options.block_size)
    buckets = buckets_for(limits.max_seqs) if options.graphs and options.device == "cuda" else ()
    profile = assemble(job_of(options, model, limits, buckets, raw), raw)
    made = profile.made | {"fitted_by": source_commit(), "fitted_on": profile.made["on"]}
    del made["on"]  # it was measured earlier
    if also:
        made["live_runs_fitted"] = fitted
    with writing(out, "Give -o another path.", CalibrationError):
        write_text(out, replace(profile, made=made).to_json())


def _run_of(file: Path, key: dict[str, Any], model: ModelSpec, options: Options) -> EngineSteps:
    """The live run in `file` as one to fit on. CalibrationError if it was cut, or is of another machine or software
    than `key`, or another model or way to run it than that of `model` and `options`."""
    live = load_result(file)
    if live.reason:
        raise CalibrationError(f"{file}: was cut: {live.reason}. {_ADVICE}")
    shape = {name: value for name, value in cast(dict[str, Any], to_plain(model)).items() if name != "name"}
    ours = {part: key[part] for part in ("hardware", "software")} | {"model": shape}
    its = live.made.get("model", {})
    check_key(live.made | {"model": {name: its.get(name) for name in shape}}, ours, str(file), _ADVICE)
    for name, asked in (("block_size", options.block_size), ("graphs", options.graphs and options.device == "cuda")):
        if (found := live.made.get(name)) != asked:
            raise CalibrationError(f"{file}: was run with {name} {found}, calibrated was {asked}. {_ADVICE}")
    steps = live.records.steps
    most = int((steps["num_decode"] + steps["num_chunks"]).max(initial=1))
    ahead = bool(len(live.records.lanes))
    spec = RunSpec("live ahead" if ahead else "live", most, True, live.seed)
    return steps_of(spec, live.records, live.rested, live.kernel_ns)


@one_line_errors
def main(
    measurements: Annotated[Path, typer.Argument(help="The file *.partial.json beside an unfinished profile.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the profile goes.")],
    also: Annotated[list[Path], typer.Option(help="A live run to fit on as well; may be given again.")] = [],  # noqa: B006
) -> None:
    """Fit a profile anew to the measurements of an unfinished one."""
    refit(measurements, out, also)


if __name__ == "__main__":
    typer.run(main)
