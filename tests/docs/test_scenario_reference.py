"""The reference of a scenario's keys: each key once, in the order of a file, with its unit, default and an example."""

from __future__ import annotations

import re
from functools import cache
from itertools import groupby

import pytest

from batchsim.base.units import (
    parse_bandwidth,
    parse_bytes,
    parse_duration_ns,
    parse_flops,
    parse_price_per_gb_month,
    parse_price_per_h,
    parse_price_per_kwh,
    parse_rate_rps,
    parse_share,
    parse_watts,
)
from batchsim.scenario.schema import scenario_schema, shipped_documents
from tests.unit.scenario.test_schema_words import keys_of
from tools.scenario_reference import ORDER, UNITS, Reference

HEADING = re.compile(r"(#+) (.*) \{ #(.*) \}")
ROW = re.compile(r"\| `(\w+)` \| (.*)(?<!\\) \| (.*)(?<!\\) \| (.*)(?<!\\) \| (.*) \|")
READ = {
    "time": parse_duration_ns,
    "rate": parse_rate_rps,
    "share": parse_share,
    "size": parse_bytes,
    "bandwidth": parse_bandwidth,
    "speed of arithmetic": parse_flops,
    "power": parse_watts,
    "price": parse_price_per_h,
    "price of energy": parse_price_per_kwh,
    "price of memory": parse_price_per_gb_month,
}


@cache
def reference() -> Reference:
    return Reference()


@cache
def page() -> list[str]:
    """The lines of the page."""
    return "\n".join(reference().page()).splitlines()


def rows() -> dict[str, list[tuple[str, ...]]]:
    """By the heading of each section its rows: key, words, value, default, example."""
    found: dict[str, list[tuple[str, ...]]] = {}
    title = ""
    for line in page():
        if heading := HEADING.fullmatch(line):
            title = heading[2]
        elif row := ROW.fullmatch(line):
            found.setdefault(title, []).append(row.groups())
    return found


def test_every_key_has_its_row() -> None:
    """In one section for each mapping of the schema, the policies by name aside: as many rows as keys, and of the same
    names."""
    schema = scenario_schema()
    schema["properties"]["policies"] = {}
    keys = [name for _, name, _ in keys_of(schema)]
    there = [row[0] for each in rows().values() for row in each]
    assert len(keys) > 550 and sorted(keys) == sorted(there)
    assert {section.title for section in reference().sections if section.node["properties"]} == set(rows())


def test_every_key_says_what_it_may_be_its_default_and_an_example() -> None:
    """And what it is, in a cell each."""
    assert [(title, row) for title, each in rows().items() for row in each if not all(row)] == []


def test_a_row_is_as_its_type_is() -> None:
    """The unit, the default in it, the ends of a range, the words that are allowed, and what is a mapping by name."""
    by_key = {(title, row[0]): row for title, each in rows().items() for row in each}
    assert by_key["workload", "warmup"][2:4] == ("[time](scenario.md#units)", "`0s`")
    assert by_key["plan.gpus.NAME", "price"][2:5] == ("[price](scenario.md#units)", "**required**", "`3.50/h`")
    assert by_key["workload.arrivals: poisson", "mean_rate"][2] == "[rate](scenario.md#units)"
    assert by_key["policies.preemptive", "watermark"][2:4] == ("[share](scenario.md#units)", "`1%`")
    assert by_key["A scenario", "seeds"][2:4] == ("whole number from 1", "`3`")
    assert by_key["A scenario", "cost_factor"][2] == "number from 0.01 to 100"
    assert by_key["A scenario", "cost"][3] == "one of `cost`, `deployment`"
    assert by_key["policies.static", "padding"][2:4] == ("`longest`, `none`", "`longest`")
    assert by_key["workload", "classes"][2] == "by name: [workload.classes.NAME](scenario.md#workload-classes-name)"


def test_sections_stand_as_a_file_has_them() -> None:
    """Those of one block together, in the order of the keys that every shipped scenario has."""
    titles = [heading[2] for line in page() if (heading := HEADING.fullmatch(line))]
    blocks = [block for block, _ in groupby(re.split(r"[.:]", title)[0] for title in titles)]
    order = [key for key in ORDER["A scenario"] if key in blocks]
    assert blocks == ["Units", "A scenario", *order, "Several values of a knob", "A class of your own"]
    for document in shipped_documents():
        assert list(document) == [key for key in ORDER["A scenario"] if key in document]


def test_links_lead_to_sections() -> None:
    """Of this page, from it and from those of the policies."""
    anchors = [heading[3] for line in page() if (heading := HEADING.fullmatch(line))]
    knobs = [line for kind in ("vllm", "preemptive") for line in reference().knobs(kind)]
    linked = set(re.findall(r"\((?:scenario\.md)?#([^)]+)\)", "\n".join(page() + knobs)))
    assert len(anchors) == len(set(anchors)) and len(linked) > 50 and linked <= set(anchors)


@pytest.mark.parametrize("name", UNITS)
def test_the_units_that_are_listed_are_read(name: str) -> None:
    """Each alone after a number, and the example."""
    example, units = UNITS[name]
    assert READ[name](example) and all(READ[name](f"2{unit}") for unit in units.split())
