"""Profiles as files: what is written is what is read, and anything else is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.base.errors import CalibrationError
from batchsim.cost.interpolation import GridReader
from batchsim.cost.profile import (
    ChunkCost,
    Curve,
    EngineSetup,
    Grid,
    HostTerm,
    Hull,
    Profile,
    StepCosts,
    SwapCost,
    load_profile,
    profile_names,
)
from batchsim.deployment.catalog import MODELS

COSTS = StepCosts(
    layers=Curve((1.0, 64.0, 512.0), (5e6, 6e6, 9.5e6)),
    head=Curve((1.0, 64.0), (250_000.0, 300_000.0)),
    decode=Curve((1.0, 8.0, 64.0), (5.2e6, 5.3e6, 6.3e6)),
    decode_attention=Grid((1, 64), (0.0, 1000.0), ((0.0, 10_000.0), (50_000.0, 1_000_000.0))),
    chunk_attention=ChunkCost(10_000.0, 20.0, 0.5),
    launch_ns=5.4e6,
    prefill_ns=150_000.0,
    in_situ=1.02,
    host=HostTerm(300_000.0, 1_500.0, 2.5, "serial", assumed=False),
    swap=SwapCost(20_000.0, 40_000.0, assumed=False),
)
PROFILE = Profile(
    name="mine",
    origin="measured",
    executor="batchsim",
    model=MODELS["llama-3.1-8b"],
    gpu="h200",
    hardware={"gpu": "NVIDIA H200", "memory_bytes": 150_000_000_000},
    software={"torch": "2.11.0", "commit": "abc", "triton": None},
    made={"seed": 0},
    block_size=16,
    num_blocks=50_000,
    costs=COSTS,
    hull=Hull(64, 512, 1000.0, 2000),
    residuals=({"region": "decode 1-8", "n": 3, "p50": 0.01, "p95": 0.02, "bias": -0.001},),
    held_out={"what": "steps", "n": 150, "p50": 0.012, "p95": 0.03, "bias": 0.002},
    samples=(
        {"block": "A", "decode": [10, 20], "chunks": [[0, 512]], "ns": 5.1e6, "mad": 1e3, "rounds": [5e6, 5.2e6]},
    ),
    missing=("energy",),
    notes=("odd “[\n 1, 2\n]” text stays as it is: ±1 %",),
    energy={"joules_per_token": 0.5},
)


def test_what_is_written_is_what_is_read() -> None:
    """Reading gives an equal profile, and writing that the same bytes."""
    text = PROFILE.to_json()
    again = Profile.from_json(text, "mine.json")
    assert again == PROFILE
    assert again.to_json() == text
    bare = replace(
        PROFILE,
        gpu=None,
        num_blocks=None,
        held_out=None,
        energy=None,
        samples=(),
        costs=replace(COSTS, decode=None, swap=None),
    )
    assert Profile.from_json(bare.to_json(), "bare.json") == bare


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=5))
def test_floats_come_back_to_the_last_bit(values: list[float]) -> None:
    """Rounding is the business of who makes a profile, not of the file."""
    curve = Curve(tuple(range(len(values))), tuple(sorted(values)))
    text = replace(PROFILE, costs=replace(COSTS, layers=curve)).to_json()
    assert Profile.from_json(text, "f").costs.layers == curve


def test_the_file_is_made_for_eyes() -> None:
    """A curve's values and a sample stand in one line each, and it is plain JSON."""
    lines = PROFILE.to_json().splitlines()
    assert any('"layers": {"x": [1.0, 64.0, 512.0]' in line for line in lines)
    assert sum('"block": "A"' in line and '"rounds"' in line for line in lines) == 1
    assert json.loads(PROFILE.to_json())["notes"] == list(PROFILE.notes)


def edited(change: Callable[[dict[str, Any]], object]) -> str:
    """The profile's text after `change` of its plain form."""
    plain = json.loads(PROFILE.to_json())
    change(plain)
    return json.dumps(plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p["costs"].update(lauch_ns=1.0), "costs.lauch_ns is not a field of costs"),
        (lambda p: p["costs"].pop("launch_ns"), "costs.launch_ns is missing"),
        (lambda p: p.pop("hull"), "hull is missing"),
        (lambda p: p["hull"].update(max_tokens=10.5), "hull.max_tokens is 10.5, expected a whole number"),
        (lambda p: p["costs"].update(in_situ=True), "costs.in_situ is True, expected a number"),
        (lambda p: p["costs"].update(in_situ=0), "costs.in_situ is 0"),
        (lambda p: p.update(origin="guessed"), "origin is 'guessed', expected 'measured' or 'imported'"),
        (lambda p: p["costs"]["host"].update(mode="async"), "costs.host.mode is 'async'"),
        (
            lambda p: p["costs"]["layers"].update(x=[1, 64, 64]),
            r"costs.layers: x does not increase: \[1.0, 64.0, 64.0\]",
        ),
        (lambda p: p["costs"]["layers"].update(x=[]), "costs.layers: x does not increase"),
        (lambda p: p["costs"]["layers"].update(x=[1, 64]), "ns has 3 values for 2 of x"),
        (lambda p: p["costs"]["layers"].update(ns=[1, -2, 3]), r"costs.layers.ns\[1\] is -2"),
        (lambda p: p["costs"]["layers"].update(ns=float("nan")), "holds NaN, which is no finite number"),
        (lambda p: p["costs"]["decode_attention"].update(ns=[[1, 2]]), "ns is not 2 rows of 2 values"),
        (lambda p: p["costs"]["chunk_attention"].update(per_pair=-1), "costs.chunk_attention.per_pair is -1"),
        (lambda p: p["hull"].update(max_tokens=0), "hull.max_tokens is 0"),
        (lambda p: p.update(num_blocks=0), "num_blocks is 0"),
        (lambda p: p["costs"]["layers"]["ns"].__setitem__(-1, 1.0), "layers falls at its end"),
        (lambda p: p["costs"]["host"].__setitem__("base", 1e300), r"base is 1e\+300. It must be from 0 to 1e\+15"),
        (lambda p: p["model"].__setitem__("dtype", "x"), "model dtype is x"),
        (lambda p: p["held_out"].pop("p50"), "the errors of .* lack p50"),
        (lambda p: p["residuals"][0].update(bias="none"), "the errors of .* lack bias"),
        (lambda p: p["residuals"][0].update(p50=-1), "p50 of the errors of .* is -1. It must be from 0 to 100"),
        (lambda p: p["held_out"].update(bias=1e308), r"bias of the errors of .* is 1e\+308. It must be above -1 and"),
        (lambda p: p["residuals"][0].update(bias=-1), r"bias of the errors of .* is -1. It must be above -1 and"),
        (lambda p: p["costs"].update(in_situ=1e307), r"costs.in_situ is 1e\+307. It must be from 0.01 to 100"),
        (lambda p: p["samples"].append(3), r"samples\[1\] is 3"),
        (lambda p: p.update(version=0), "version 0 of the format; this batchsim reads 2"),
        (lambda p: p.update(version=3), "version 3 of the format; this batchsim reads 2"),
        (lambda p: p.update(format="yaml"), "is not a batchsim-profile"),
    ],
)
def test_whatever_does_not_belong_is_refused(change: Callable[[dict[str, Any]], object], message: str) -> None:
    """One line that begins with the file and names the place in it."""
    with pytest.raises(CalibrationError, match=message) as caught:
        Profile.from_json(edited(change), "mine.json")
    assert str(caught.value).startswith("mine.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PROFILE.to_json()[:500], "is not JSON"),
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is not a batchsim-profile"),
        (PROFILE.to_json().replace("1.02", "1e999"), "holds 1e999"),
        (PROFILE.to_json().replace("1.02", "-Infinity"), "holds -Infinity"),
        ('{"version": 1, ' + PROFILE.to_json()[1:], "'version' is given twice"),
    ],
    ids=["cut", "empty", "deep", "list", "huge", "infinite", "twice"],
)
def test_corrupt_files_are_refused(text: str, message: str) -> None:
    """A file cut short or edited to nonsense is named, without a traceback."""
    with pytest.raises(CalibrationError, match=message):
        Profile.from_json(text, "mine.json")


def test_profiles_are_found_by_name_and_by_path(tmp_path: Path) -> None:
    """A shipped name needs no path; a file is read where it is."""
    name = profile_names()[0]
    assert load_profile(name).name == name
    (tmp_path / "mine.json").write_text(PROFILE.to_json(), encoding="utf-8")
    assert load_profile(tmp_path / "mine.json") == PROFILE


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "llama-3.1-8b-h200-vllm-0.24.1",
            r"neither a shipped profile nor a file\. Did you mean llama-3.1-8b-h200-vllm",
        ),
        ("b300", "Write a deployment, which finds the shipped ones"),
        ("folder/mine.json", r"folder/mine.json: neither a shipped profile nor a file\. Check the path"),
        (".", "cannot be read: is a folder"),
        ("a\0b", "cannot be read"),
    ],
)
def test_a_profile_that_is_not_there_is_named(name: str, message: str) -> None:
    """With the nearest one where there is a near one."""
    with pytest.raises(CalibrationError, match=message):
        load_profile(name)


def test_a_curve_is_linear_between_its_knots_and_flat_before_them() -> None:
    """Below the first knot its value, beyond the last the last segment, on a knot the measured value."""
    curve = Curve((10.0, 20.0, 40.0), (100.0, 300.0, 400.0))
    np.testing.assert_allclose(curve.at(np.array([0, 10, 15, 20, 30, 40, 60])), [100, 100, 200, 300, 350, 400, 500])
    np.testing.assert_allclose(Curve((8.0,), (7.0,)).at(np.array([1, 8, 99])), [7, 7, 7])
    np.testing.assert_allclose(curve.holding(np.array([1, 10, 11, 40])), [100, 100, 300, 400])


def test_a_grid_is_bilinear() -> None:
    """Between knots the mean of the corners by distance; a grid of one cell is a constant."""
    grid = Grid((1, 3), (0.0, 100.0), ((0.0, 100.0), (20.0, 200.0)))
    asked = np.array([1, 3, 2, 2, 5]), np.array([50, 50, 0, 50, 200])
    np.testing.assert_allclose(grid.at(*asked), [50, 110, 10, 80, 560])
    np.testing.assert_allclose(Grid((4,), (9.0,), ((3.0,),)).at(np.array([1, 8]), np.array([0, 99])), [3, 3])


def test_one_number_of_a_curve_equals_that_of_many() -> None:
    """Bit for bit, at and between knots and outside of them; so do whole numbers that come again and again."""
    curve = Curve((10.0, 20.0, 40.0, 41.0), (0.1, 300.7, 400.3, 1e6))
    asked = np.arange(60)
    each = np.array([curve.at(np.array([x]))[0] for x in asked])
    assert [curve.at_one(x) for x in asked.tolist()] == each.tolist()
    many = np.tile(asked, 9)
    assert curve.at(many).tolist() == each[many].tolist()
    assert Curve((8.0,), (7.0,)).at_one(99) == 7
    assert [curve.holding_one(x) for x in (1, 10, 11, 41)] == curve.holding(np.array([1, 10, 11, 41])).tolist()


def test_one_pair_of_a_grid_equals_that_of_many() -> None:
    """Inside, below and beyond the knots, to the last bit."""
    grid = Grid((1, 7, 64), (1.0, 30.0, 1000.0), ((1.1, 20.3, 700.7), (3.3, 50.1, 3e3), (9.7, 400.3, 8e4)))
    pairs = [(b, x) for b in (1, 2, 7, 63, 64, 200) for x in (0.0, 1.0, 17.3, 30.0, 999.9, 5e4)]
    many = grid.at(np.array([b for b, _ in pairs]), np.array([x for _, x in pairs]))
    reader = GridReader(grid)
    assert [reader.at(b, x) for b, x in pairs] == many.tolist() == [reader.at(b, x) for b, x in pairs]
    flat = Grid((1, 7), (5.0,), ((1.1,), (3.3,)))
    assert GridReader(flat).at(4, 9.0) == flat.at(np.array([4]), np.array([9.0]))[0]


def test_what_a_measured_profile_lacks_is_not_written() -> None:
    """The terms of kernel tables stand in a file only where a profile has them, and come back equal."""
    written = json.loads(PROFILE.to_json())
    assert not {"setup"} & written.keys() and not {"chunk_grid", "beside", "transfer"} & written["costs"].keys()
    costs = replace(COSTS, chunk_grid=COSTS.decode_attention, beside=1.5, transfer=COSTS.head)
    tables = replace(PROFILE, costs=costs, setup=EngineSetup("sglang", "0.5.14", tp=8, pp=2, kv_dtype="fp8"))
    assert Profile.from_json(tables.to_json(), "tables.json") == tables
    its = tables.deployment
    assert (its.engine, its.version, its.tp, its.pp, its.kv_dtype) == ("sglang", "0.5.14", 8, 2, "fp8")


def test_a_row_of_a_grid_is_its_values_at_every_context() -> None:
    """Bit for bit, before, between, on and beyond its numbers of sequences; in many steps few numbers come again."""
    grid = Grid((2, 3, 7), (1.0, 10.0, 100.0), ((0.1, 0.2, 0.7), (0.3, 0.9, 1.7), (1.1, 3.3, 7.7)))
    contexts = np.array(grid.context)
    rows = [grid.at(np.full(3, n), contexts).tolist() for n in range(1, 10)]
    assert [grid.row(n) for n in range(1, 10)] == rows
    again = np.arange(90) % 9
    assert grid.at(again + 1, np.full(90, 10.0)).tolist() == [rows[n][1] for n in again]
