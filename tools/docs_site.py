"""The documentation site, whole: the pages of docs/, and what is made anew for it, so that none of that can grow old:
reference pages from commands, the scenario's schema and docstrings, and every policy at work.

    python -m tools.docs_site build [FOLDER]          (FOLDER is build unless given; the site is FOLDER/site)

FOLDER/docs is made first, and Zensical makes pages of it: it refuses links of Markdown that lead to no page, or to no
place of one. Pages link to files of the clone as GitHub does, by `../`: pictures come along, and other files, which the
site does not have, become their names.
"""

from __future__ import annotations

import inspect
import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import typer.main
import yaml
from typer.cli import get_docs_for_click

import batchsim
from batchsim.api import typed
from batchsim.base.files import read_text, write_bytes, write_text
from batchsim.cli import app
from batchsim.policies.registry import POLICIES
from batchsim.scenario.described import field_words
from tools.scenario_reference import Reference

ROOT = Path(__file__).parents[1]
CONFIG = "zensical.toml"
_LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\(\.\./(?P<path>[^)#]+)\)")
_PART = re.compile(r"\s+(Rule|Source|Simplifies): ")
_QUOTED = re.compile(r"""(: |-> )(['"])(.*?)\2(?=, | = |\)|$)""")
_LOADED = re.compile(r"<(script|img|iframe|link|source|video|audio|embed|object)\b([^>]*)>")
_ADDRESS = re.compile(r"""\b(?:href|src|data)=["']?([^"'\s>]+)""")
_FROM_AFAR = re.compile(r"""(?:url\(|@import)\s*["']?\s*(https?:)?//""")
_TUTORIALS = "tutorials"  # whose links by `../` are to pages of docs: they name no files of the clone


def build(folder: Path) -> list[str]:
    """Makes the site in `folder`/site; what is wrong with it, a line each. `folder` is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    config = read_text(ROOT / CONFIG)
    write_text(folder / CONFIG, config)
    pages = prepare(folder / "docs")
    listed = set(re.findall(r'"([\w/-]+\.md)"', config))
    wrong = [f"{page}: is not in the nav of {CONFIG}" for page in sorted(pages - listed)]
    wrong += [f"{CONFIG}: its nav has {page}, and there is no such page" for page in sorted(listed - pages)]
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(folder / CONFIG)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return [*wrong, *(done.stdout + done.stderr).splitlines()]
    return wrong + faults(folder / "site")


def faults(site: Path) -> list[str]:
    """A line for each picture that is not in `site`, and for all that its pages and sheets load from elsewhere."""
    pages = sorted(site.rglob("*.html"))
    wrong = [f"{site}: has no pages"] if not pages else []
    for page in pages:
        where = page.relative_to(site)
        for tag, address in (
            (tag, link) for tag, rest in _LOADED.findall(read_text(page)) for link in _ADDRESS.findall(rest)
        ):
            if re.match("(https?:)?//", address):
                wrong.append(f"{where}: {address} is fetched from elsewhere")
            elif tag == "img" and not address.startswith("data:") and not (page.parent / unquote(address)).is_file():
                wrong.append(f"{where}: {address} is not there")
    sheets = [path for path in sorted(site.rglob("*.css")) if _FROM_AFAR.search(read_text(path))]
    return wrong + [f"{path.relative_to(site)}: fetches from elsewhere" for path in sheets]


def prepare(docs: Path) -> set[str]:
    """Lays into `docs`, which is emptied before, all that the site is made of; the names of its pages."""
    shutil.rmtree(docs, ignore_errors=True)
    shutil.copytree(ROOT / "docs", docs)
    for page in docs.rglob("*.md"):
        if page.parent.name == _TUTORIALS:
            continue
        text = read_text(page)
        for path in {match["path"] for match in _LINK.finditer(text)}:
            if path.endswith(".png"):
                (docs / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / path, docs / path)
        write_text(page, _LINK.sub(_on_site, text))
    reference = Reference()
    made = {"commands": commands(), "scenario": reference.page(), "python": python_names()}
    made |= {f"policy-{kind}": policy_page(kind, reference) for kind in POLICIES}
    (docs / "reference").mkdir()
    for name, lines in made.items():
        write_text(docs / f"reference/{name}.md", "\n".join(lines) + "\n")
    for kind, picture in pictures_at_work().items():
        write_bytes(docs / f"reference/policy-{kind}.png", picture)
    return {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")}


def _on_site(match: re.Match[str]) -> str:
    text, path = match["text"], match["path"]
    if not (ROOT / path).exists():
        raise ValueError(f"docs name ../{path}, which is not there")
    return f"{text}({path})" if path.endswith(".png") else f"{text[1:-1]} (`{path}`)"


def commands() -> Iterator[str]:
    """A page on every command, from its help, as `typer utils docs` makes it."""
    root = typer.main.get_command(app)
    context = typer.Context(root, info_name="batchsim")
    yield get_docs_for_click(obj=root, ctx=context, name="batchsim", title="Commands")


def policy_page(kind: str, reference: Reference) -> Iterator[str]:
    """Lines of a page on a policy: its rule and source, as the head of its file has them, its knobs, and it at work."""
    _, policy = POLICIES[kind]
    own = {each.__module__: None for each in policy.__mro__ if each.__module__.startswith("batchsim.policies")}
    of_system = [name for name in own if ".systems." in name] or [policy.__module__]
    yield f"# {kind}\n"
    for name in reversed(of_system):
        text = inspect.cleandoc(sys.modules[name].__doc__ or "")
        yield _PART.sub(r"\n\n**\1:** ", text) + "\n"
    path = policy.__module__.replace("batchsim.", "sim.").replace(".", "/")
    yield f"Source: `{path}.py`, class `{policy.__name__}`.\n"
    yield f"![Running and waiting sequences, and KV in use, of {kind} over time](policy-{kind}.png)\n"
    yield "*Sixty requests in bursts on an engine with 6,000 tokens of KV memory, steps of 10 ms and more: invented.*\n"
    if rows := list(reference.knobs(kind)):
        yield "## Knobs\n"
        yield from rows


def pictures_at_work() -> dict[str, bytes]:
    """A PNG of every policy under the same small load, by the policy's kind."""
    found: dict[str, bytes] = {}
    work = yaml.safe_load(read_text(Path(__file__).with_name("at_work.yaml")))
    with tempfile.TemporaryDirectory() as folder:
        for kind in POLICIES:
            results = batchsim.run(work | {"policies": {kind: work["policies"].get(kind, {})}}, out=folder)
            drawn = io.BytesIO()
            results.plot.timeline().savefig(drawn, format="png", metadata={"Software": None})
            found[kind] = drawn.getvalue()
    return found


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
            words = [(field, text) for field, text in field_words(thing).items() if field != "kind"]
            yield "".join(f"- `{field}`: {text}.\n" for field, text in words)
            for each, member in vars(thing).items():
                if not each.startswith("_") and callable(member) and inspect.getdoc(member):
                    yield f"### {name}.{each}\n"
                    yield f"```python\n{each}{_signature(member)}\n```\n"
                    yield _with_fences(inspect.getdoc(member) or "") + "\n"


def _with_fences(text: str) -> str:
    """A docstring as Markdown: its examples, paragraphs that begin with a prompt, are blocks of code."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(f"```pycon\n{each}\n```" if each.startswith(">>> ") else each for each in paragraphs)


def _signature(thing: Any) -> str:
    """How `thing` is called, an argument a line where it has many."""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return "(...)"
    if signature.return_annotation in (None, "None") and inspect.isclass(thing):
        signature = signature.replace(return_annotation=inspect.Signature.empty)
    text = _QUOTED.sub(r"\1\3", str(signature)).replace("= Ellipsis", "= ...")
    if len(text) <= 100:
        return text
    inside, closing = text[1:].rsplit(")", 1)
    names = "|".join(map(re.escape, signature.parameters))
    return "(\n    " + re.sub(rf", (?=(?:\*|/|{names})(?:,|:|=|$))", ",\n    ", inside) + f",\n){closing}"


if __name__ == "__main__":
    if sys.argv[1:2] != ["build"] or len(sys.argv) > 3:
        sys.exit("python -m tools.docs_site build [FOLDER]")
    if wrong := build(Path(sys.argv[2] if len(sys.argv) == 3 else "build").absolute()):
        sys.exit("\n".join(wrong))
