"""`batchsim trace reuse`: what a cache of any size would find again of a trace's prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from batchsim.base.errors import ScenarioError
from batchsim.base.files import writing
from batchsim.cli import option
from batchsim.cli.common import check_output, one_line_errors, print_json
from batchsim.cli.traces import rows_of, trace_config


@one_line_errors
def reuse(
    file: Annotated[Path, typer.Argument(help="A trace whose prompts have hash_ids: JSON lines, JSON or Parquet.")],
    cache: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SIZE", help="A cache to mark: tokens, or with --model bytes, like host=256GB."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model whose KV is cached, as in scenarios.")] = None,
    kv: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Type of its KV.", show_default="the checkpoint's own")
    ] = None,
    outputs: Annotated[
        bool, typer.Option("--outputs", help="Outputs take room too, as in a GPU's prefix cache.")
    ] = False,
    sample: Annotated[
        str | None, typer.Option(metavar="SHARE", help="Follow this share of the units, of a large trace.")
    ] = None,
    format_: option.Format = "auto",
    columns: option.Columns = None,
    time_unit: option.TimeUnit = None,
    set_: option.TraceSet = None,
    out: option.TracePicture = None,
    as_json: option.Json = False,
) -> None:
    """Show what part of a trace's prompts a cache of each size would find again, from one pass over it.

    Example: batchsim trace reuse my.jsonl --model llama-3.1-8b --cache gpu=40GB --cache host=256GB
    """
    from batchsim.report.pictures.reuse_picture import KIND, reuse_picture
    from batchsim.report.text.reuse_text import reuse_plain, reuse_text
    from batchsim.workload.traces.reuse import reuse_curve

    token_bytes = _token_bytes(model, kv)
    caches: dict[str, float] = {}
    for text in cache or ():
        name, tokens = _cache(text, token_bytes)
        if name in caches:
            raise ScenarioError(f"--cache {text}: {name} is named twice. Give each cache a name of its own.")
        caches[name] = tokens
    share = _share(sample)
    config = trace_config(file, format_, columns, time_unit, set_)
    if out is None and not as_json:
        out = Path(f"{file.name.partition('.')[0]}.reuse.png")
    if out is not None:
        check_output(out, KIND, "Give another path with --out.")
    rows = rows_of(config)
    curve = reuse_curve(rows, outputs=outputs, share=share)
    small = next((name for name, tokens in caches.items() if share < 1 and tokens < curve.least_tokens), None)
    if small is not None:
        raise ScenarioError(
            f"--cache {small}: is {caches[small]:,.0f} tokens, and a sample of {sample} of the units says nothing of"
            f" caches below {curve.least_tokens:,}. Raise --sample, or drop it."
        )
    if out is not None:
        with writing(out, "Give another path with --out."):
            reuse_picture(curve, caches, token_bytes, rows.source, out)
    if as_json:
        print_json(reuse_plain(curve, caches, token_bytes))
        return
    typer.echo(reuse_text(rows, curve, caches, token_bytes))
    typer.echo(out)


def _token_bytes(model: str | None, kv: str | None) -> int | None:
    """Bytes of a token's KV in all layers, of all GPUs together; None without a model."""
    from batchsim.deployment.catalog import read_model
    from batchsim.deployment.deployment import Deployment

    if model is None:
        if kv is not None:
            raise ScenarioError(f"--kv {kv}: is a model's, and none is named. Add --model.")
        return None
    engine = Deployment(read_model(model), kv_dtype=kv or "")
    kinds = {(each.attention.kind, each.attention.window) for each in engine.model.kinds}
    if len(kinds) > 1 or not kinds <= {("grouped", None), ("latent", None)}:
        raise ScenarioError(
            f"--model {model}: its layers keep unlike numbers of tokens of a request, and no one number of bytes is a"
            " token's. Drop --model, and state caches in tokens."
        )
    return engine.kv_bytes_per_token


def _cache(text: str, token_bytes: int | None) -> tuple[str, float]:
    """(Name, tokens) of `NAME=SIZE`."""
    from batchsim.base.units import parse_bytes

    name, _, size = text.partition("=")
    try:
        tokens = int(size) if size.isascii() and size.isdigit() else None
        held = parse_bytes(size) if tokens is None else 0
    except ValueError as error:
        raise ScenarioError(f"--cache {text}: {error}") from None
    if not name or tokens == 0 or name == "all of it" or name.endswith(" of that"):  # rows of the table
        raise ScenarioError(f"--cache {text}: write a name and a size above 0, like host=256GB.")
    if tokens is not None:
        return name, float(tokens)
    if token_bytes is None:
        raise ScenarioError(f"--cache {text}: how many tokens are in {size} depends on the model. Add --model.")
    if held < token_bytes:
        raise ScenarioError(f"--cache {text}: is less than one token's {token_bytes:,} B. Write a larger one.")
    return name, held / token_bytes


def _share(sample: str | None) -> float:
    from batchsim.base.units import parse_share

    try:
        share = 1.0 if sample is None else parse_share(sample)
    except ValueError as error:
        raise ScenarioError(f"--sample {sample}: {error}") from None
    if not 0 < share <= 1:
        raise ScenarioError(f"--sample {sample}: write a share above 0 and up to 100%, like 10%.")
    return share
