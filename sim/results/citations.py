"""What a run rests on: papers, engines and their versions, step costs and data, as text and as BibTeX.

Where a rule comes from is said once, after "Source:" at the head of the file that has it; which engine and version a
policy follows in `policies/evidence.py`; where step costs come from in the run's manifest; where a trace is to be had
in its scenario. Here are the papers in full that those name in short.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from batchsim.drive.fleet.routing import ROUTERS
from batchsim.drive.fleet.scaling.kinds import Scaler
from batchsim.policies.evidence import FOLLOWED
from batchsim.policies.registry import POLICIES
from batchsim.results.read import Results

_SOURCE = re.compile(r"(?:^ *|\. )Source:\s(.*?\.)$", re.MULTILINE | re.DOTALL)
_ARXIV = re.compile(r"arXiv:? ?(\d{4}\.\d{4,5})")
_SPECIAL = re.compile(r"([&%$#_{}])")

Paper = tuple[str, str, str, str, str]
"""Key, authors, title, where it appeared, and the year."""
PAPERS: dict[str, Paper] = {
    "Orca (OSDI 2022)": (
        "yu2022orca",
        "Yu, Gyeong-In and Jeong, Joo Seong and Kim, Geon-Woo and Kim, Soojeong and Chun, Byung-Gon",
        "Orca: A Distributed Serving System for Transformer-Based Generative Models",
        "OSDI",
        "2022",
    ),
    "Sarathi-Serve (OSDI 2024)": (
        "agrawal2024sarathi",
        "Agrawal, Amey and others",
        "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve",
        "OSDI",
        "2024",
    ),
    "PagedAttention (SOSP 2023)": (
        "kwon2023pagedattention",
        "Kwon, Woosuk and others",
        "Efficient Memory Management for Large Language Model Serving with PagedAttention",
        "SOSP",
        "2023",
    ),
    "Clockwork (OSDI 2020)": (
        "gujarati2020clockwork",
        "Gujarati, Arpan and others",
        "Serving DNNs like Clockwork: Performance Predictability from the Bottom Up",
        "OSDI",
        "2020",
    ),
    "nexus (SOSP 2019)": (
        "shen2019nexus",
        "Shen, Haichen and others",
        "Nexus: A GPU Cluster Engine for Accelerating DNN-Based Video Analysis",
        "SOSP",
        "2019",
    ),
    "Clipper (NSDI 2017)": (
        "crankshaw2017clipper",
        "Crankshaw, Daniel and others",
        "Clipper: A Low-Latency Online Prediction Serving System",
        "NSDI",
        "2017",
    ),
    "Takagi, Analysis of Polling Systems": (
        "takagi1986polling",
        "Takagi, Hideaki",
        "Analysis of Polling Systems",
        "MIT Press",
        "1986",
    ),
    "The power of two choices in randomized load balancing": (
        "mitzenmacher2001power",
        "Mitzenmacher, Michael",
        "The Power of Two Choices in Randomized Load Balancing",
        "IEEE TPDS 12(10)",
        "2001",
    ),
}
"""Papers by the words that name them in sources."""
_SAME = {
    "Orca (Yu et al., OSDI 2022": "Orca (OSDI 2022)",
    "Agrawal et al., OSDI 2024": "Sarathi-Serve (OSDI 2024)",
    "vLLM (Kwon et al., SOSP 2023)": "PagedAttention (SOSP 2023)",
}
"""Other words for one of PAPERS."""


@dataclass(frozen=True)
class Citation:
    """One thing that a run rests on. `of`: its part in the run; `fields`: those of its BibTeX entry `kind`."""

    key: str
    of: str
    text: str
    kind: str = "misc"
    fields: Mapping[str, str] = field(default_factory=dict[str, str])

    def bibtex(self) -> str:
        """The entry, with what the text says as a note where it has no fields of a paper."""
        escaped = {name: _SPECIAL.sub(r"\\\1", value) for name, value in self.fields.items()}
        lines = [f"  {name} = {{{value}}}," for name, value in escaped.items()]
        return "\n".join([f"@{self.kind}{{{self.key},", *lines, "}"])


def source_of(thing: Any) -> str:
    """The sentence after "Source:" in the text of a class, or at the head of its file; "" where there is none."""
    for text in (thing.__doc__, sys.modules[thing.__module__].__doc__):
        if match := _SOURCE.search(text or ""):
            return " ".join(match[1].split())
    return ""


def citations(results: Results) -> list[Citation]:
    """What the run rests on: batchsim itself, each policy, router and autoscaler, step costs, data, and the papers that
    the sources of these name, each once."""
    manifest = results.manifest
    parts = [*_itself(manifest), *_policies(results), *_fleet(manifest["scenario"]), *_inputs(manifest)]
    papers = {paper.key: paper for part in parts for paper in papers_in(part.text)}
    return [*parts, *papers.values()]


def papers_in(text: str) -> Iterator[Citation]:
    """The papers that a source names: in full where PAPERS has them, by their number in arXiv where not."""
    for words, name in {**{name: name for name in PAPERS}, **_SAME}.items():
        if words in text:
            key, author, title, where, year = PAPERS[name]
            fields = {"author": author, "title": title, "booktitle": where, "year": year}
            yield Citation(key, "paper", f"{author}: {title}. {where} {year}.", "inproceedings", fields)
    for number in _ARXIV.findall(text):
        address = f"https://arxiv.org/abs/{number}"
        fields = {"title": f"arXiv:{number}", "eprint": number, "archiveprefix": "arXiv", "howpublished": address}
        yield Citation(f"arxiv_{number.replace('.', '_')}", "paper", address, "misc", fields)


def _noted(key: str, of: str, title: str, text: str) -> Citation:
    said = f"{title}: {text}" if text else f"{title}."
    return Citation(key, of, said, "misc", {"title": title, **({"note": text} if text else {})})


def _itself(manifest: Mapping[str, Any]) -> Iterator[Citation]:
    packages = manifest["packages"]
    version = f"{packages['batchsim']}, commit {manifest['commit'] or 'not known'}, code {manifest['code']}"
    fields = {"title": "batchsim", "author": "The batchsim maintainers", "version": version}
    yield Citation("batchsim", "simulator", f"batchsim {version}.", "software", fields)
    others = ", ".join(f"{name} {have}" for name, have in packages.items() if name != "batchsim")
    yield _noted("packages", "packages", f"Python {manifest['python']}", f"{others}.")


def _policies(results: Results) -> Iterator[Citation]:
    for kind in dict.fromkeys(str(kind) for kind in results.summary["kind"]):
        followed = FOLLOWED.get(kind)
        if kind not in POLICIES:
            yield _noted(_key("policy", kind), f"policy {kind}", kind, "code of its own, of the user or a package.")
            continue
        policy = POLICIES[kind][1]
        title = f"{followed.engine} {followed.version}" if followed else f"batchsim's own rule {kind}"
        yield _noted(_key("policy", kind), f"policy {kind} ({policy.evidence})", title, source_of(policy))


def _fleet(scenario: Mapping[str, Any]) -> Iterator[Citation]:
    fleet = scenario.get("replicas") or {}
    scalers = {config.kind: config for config in get_args(Scaler)}
    for part, known in (("router", ROUTERS), ("autoscaler", scalers)):
        kind = str((fleet.get(part) or {}).get("kind", ""))
        if kind in known:
            source = source_of(known[kind]) or "a rule of batchsim's own."
            yield _noted(_key(part, kind), f"{part} {kind}", f"{part} {kind}", source)
        elif kind:
            yield _noted(_key(part, kind), f"{part} {kind}", kind, "code of its own, of the user or a package.")


def _inputs(manifest: Mapping[str, Any]) -> Iterator[Citation]:
    scenario = manifest["scenario"]
    if sources := manifest.get("sources"):  # a live run has none: its steps took what they took
        yield _noted("step_costs", "step costs", "Step costs", "; ".join(map(str, sources)) + ".")
    model = scenario["model"]
    name = model if isinstance(model, str) else (model.get("name") or model.get("hub") or "stated in the scenario")
    yield _noted("model", "model", f"Model {name}", "")
    if trace := scenario["workload"].get("trace"):
        facts = [str(trace[key]) for key in ("fetch", "sha256") if trace.get(key)]
        yield _noted("trace", "data", f"Trace {trace['path']}", ", SHA-256 ".join(facts))


def _key(part: str, kind: str) -> str:
    return re.sub(r"\W+", "_", f"{part}_{kind}")
