"""What the documentation site has beside the pages in docs/: pictures of kept results, and reference pages made from
commands, the scenario schema and docstrings, so that none of it can grow old.

A hook of MkDocs, named in mkdocs.yml. Pages link to files of the clone as GitHub does, by `../`: pictures come along,
and other files, which the site does not have, become their names.
"""

from __future__ import annotations

import inspect
import io
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url
from typer.cli import get_docs_for_click

import batchsim
from batchsim.api import typed
from batchsim.cli import app
from batchsim.policies.registry import POLICIES
from batchsim.scenario.schema import scenario_schema

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\(\.\./(?P<path>[^)#]+)\)")
_FETCHED = "https://unpkg.com/iframe-worker/shim"
_TUTORIALS = "tutorials/"  # whose links by `../` are to pages of docs: they name no files of the clone


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pictures that pages show, and the reference."""
    pictures: set[str] = set()
    for page in files.documentation_pages():
        if page.src_uri.startswith(_TUTORIALS):
            continue
        found = (match["path"] for match in _LINK.finditer(page.content_string))
        pictures |= {path for path in found if path.endswith(".png")}
    for path in sorted(pictures):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    made = {"commands": commands(), "scenario": scenario_keys(), "python": python_names()}
    made |= {f"policy-{kind}": policy_page(kind) for kind in POLICIES}
    for name, lines in made.items():
        files.append(File.generated(config, f"reference/{name}.md", content="\n".join(lines) + "\n"))
    for kind, picture in pictures_at_work().items():
        files.append(File.generated(config, f"reference/policy-{kind}.png", content=picture))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """`markdown` with links to files of the clone as the site has them."""
    del config, files
    if page.file.src_uri.startswith(_TUTORIALS):
        return markdown
    return _LINK.sub(_on_site, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """`output` with our script in the place of one that the offline plugin fetches from elsewhere."""
    del config
    return output.replace(_FETCHED, get_relative_url("site.js", page.url))


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """The page for addresses that do not exist, which a server shows, alike."""
    del template_name, config
    return output_content.replace(_FETCHED, "/site.js")


def _on_site(match: re.Match[str]) -> str:
    text, path = match["text"], match["path"]
    if not (ROOT / path).exists():
        raise ValueError(f"docs name ../{path}, which is not there")
    return f"{text}({path})" if path.endswith(".png") else f"{text[1:-1]} (`{path}`)"


# ---- commands


def commands() -> Iterator[str]:
    """A page on every command, from its help, as `typer utils docs` makes it."""
    root = typer.main.get_command(app)
    context = typer.Context(root, info_name="batchsim")
    yield get_docs_for_click(obj=root, ctx=context, name="batchsim", title="Commands")


# ---- the scenario's keys


def scenario_keys() -> Iterator[str]:
    """Lines of a page on every key of a scenario, a table a kind of mapping."""
    schema = scenario_schema()
    yield "# Scenario keys\n\nMade from the JSON schema, which `batchsim schema` prints.\n"
    for name, part in {"a scenario": schema, **schema.get("$defs", {})}.items():
        yield f"## {name}\n"
        if part.get("description"):
            yield _cell(part["description"], table=False) + "\n"
        if properties := part.get("properties"):
            yield from ("| key | | |", "|---|---|---|")
            yield from (f"| `{key}` | {_kind(value)} | {_cell(value.get('description', ''))} |"
                        for key, value in properties.items())  # fmt: skip
            yield ""
        elif kind := _kind(part):
            yield f"One of: {kind}\n"


def _kind(value: Mapping[str, Any]) -> str:
    if "$ref" in value:
        name = str(value["$ref"]).rpartition("/")[2]
        return f"[{name}](scenario.md#{re.sub(r'[^a-z0-9_ -]', '', name.lower()).replace(' ', '-')})"
    for key in ("anyOf", "oneOf"):
        if key in value:
            return ", ".join(dict.fromkeys(filter(None, map(_kind, value[key]))))
    if "enum" in value:
        return ", ".join(f"`{each}`" for each in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    found = value.get("type", "")
    return _cell(found if isinstance(found, str) else ", ".join(found))


def _cell(text: str, *, table: bool = True) -> str:
    text = re.sub(r"\s+", " ", text)
    return text.replace("|", "\\|") if table else text


# ---- policies


def policy_page(kind: str) -> Iterator[str]:
    """Lines of a page on a policy: its rule and source, as the head of its file has them, its knobs, and it at work."""
    _, policy = POLICIES[kind]
    own = {each.__module__: None for each in policy.__mro__ if each.__module__.startswith("batchsim.policies")}
    of_system = [name for name in own if ".systems." in name] or [policy.__module__]
    yield f"# {kind}\n"
    for name in reversed(of_system):
        yield inspect.cleandoc(sys.modules[name].__doc__ or "") + "\n"
    path = policy.__module__.replace("batchsim.", "sim.").replace(".", "/")
    yield f"Source: `{path}.py`, class `{policy.__name__}`.\n"
    yield f"![Running and waiting sequences, and KV in use, of {kind} over time](policy-{kind}.png)\n"
    yield "*Sixty requests in bursts on an engine with 6,000 tokens of KV memory, steps of 10 ms and more: invented.*\n"
    properties = scenario_schema()["$defs"][f"policy_{kind}"].get("properties", {})
    if rows := [(key, value) for key, value in properties.items() if key != "kind"]:
        yield "## Knobs\n"
        yield from ("| knob | | default | |", "|---|---|---|---|")
        for key, value in rows:
            default = "" if value.get("default") is None else f"`{value['default']}`"
            yield f"| `{key}` | {_kind(value)} | {default} | {_cell(value.get('description', ''))} |"
        yield ""


def pictures_at_work() -> dict[str, bytes]:
    """A PNG of every policy under the same small load, by the policy's kind."""
    found: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in POLICIES:
            results = batchsim.run(_WORK | {"policies": {kind: _NEEDED.get(kind, {})}}, out=folder)
            drawn = io.BytesIO()
            results.plot.timeline().savefig(drawn, format="png", metadata={"Software": None})
            found[kind] = drawn.getvalue()
    return found


_WORK: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "cost": {"kind": "linear", "base": "10ms", "per_token": "30us", "per_sequence": "200us"},
    "kv": {"tokens": 6000},
    "max_model_len": 2048,
    "workload": {
        "arrivals": {"kind": "on_off", "mean_rate": "12/s", "on": "2s", "off": "3s"},
        "output_cap": 512,
        "requests": 60,
        "lengths": {
            "prompt": {"kind": "lognormal", "mean": 300, "cv": 0.8, "max": 1000},
            "output": {"kind": "lognormal", "mean": 80, "cv": 0.8, "max": 400},
        },
    },
    "slo": "ttft<1s @ 95%",
    "load": {"mean_rate": ["12/s"]},
    "seeds": 1,
}
_SLOTS = {"max_num_seqs": 16, "max_num_batched_tokens": 512}
_NEEDED: dict[str, dict[str, Any]] = {
    "static": {"batch_size": 8, "max_wait": "200ms"},
    "dynamic": {"max_batch_size": 8, "max_queue_delay": "200ms"},
    "continuous": _SLOTS,
    "preemptive": _SLOTS,
    "tf_serving": {"num_batch_threads": 1},
}
"""Knobs without which a policy is not one, beside its defaults."""


# ---- Python


def python_names() -> Iterator[str]:
    """Lines of a page on every public name, with its signature and docstring."""
    yield "# Python names\n\nMade from the docstrings of `import batchsim`. Names that an example does not make are"
    yield "of the examples of `Scenario`, `run`, `capacity` and `plan`.\n"
    yield '`Rate` is a text, `"8/s"`, or requests a second; `Time` `"50ms"` or ns; `Share` `"99%"` or a fraction.\n'
    for name in batchsim.__all__:
        thing = getattr(batchsim, name)
        yield f"## batchsim.{name}\n"
        yield f"```python\n{name}{_signature(getattr(typed, name, thing))}\n```\n"
        yield _with_fences(inspect.getdoc(thing) or "") + "\n"
        if inspect.isclass(thing):
            for each, member in vars(thing).items():
                if not each.startswith("_") and callable(member) and inspect.getdoc(member):
                    yield f"### {name}.{each}\n"
                    yield f"```python\n{each}{_signature(member)}\n```\n"
                    yield _with_fences(inspect.getdoc(member) or "") + "\n"


def _with_fences(text: str) -> str:
    """A docstring as Markdown: its examples, paragraphs that begin with a prompt, are blocks of code."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(f"```pycon\n{each}\n```" if each.startswith(">>> ") else each for each in paragraphs)


class _Words(str):
    """An annotation that a signature shows without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _signature(thing: Any) -> str:
    """How `thing` is called, an argument a line where it has many."""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return "(...)"
    plain = [
        each.replace(annotation=_Words(each.annotation)) if isinstance(each.annotation, str) else each
        for each in signature.parameters.values()
    ]
    returned = signature.return_annotation
    made = returned in (inspect.Signature.empty, None, "None") and inspect.isclass(thing)
    end = inspect.Signature.empty if made else _Words(returned) if isinstance(returned, str) else returned
    text = str(signature.replace(parameters=plain, return_annotation=end)).replace("= Ellipsis", "= ...")
    if len(text) <= 100:
        return text
    inside, closing = text[1:].rsplit(")", 1)
    names = "|".join(re.escape(each.name) for each in plain)
    return "(\n    " + re.sub(rf", (?=(?:\*|/|{names})(?:,|:|=|$))", ",\n    ", inside) + f",\n){closing}"
