"""Scenarios made in Python: from mappings, from typed objects, and what is said of wrong ones."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from batchsim.base.errors import ScenarioError
from batchsim.base.units import Duration, Flops, Rate, Share, parse_share
from batchsim.policies.families.continuous import ContinuousConfig
from batchsim.scenario.constructor import scenario
from batchsim.scenario.kv_config import KvConfig
from batchsim.scenario.load import load_scenario, shipped_scenarios
from batchsim.workload.laws import FixedTokens
from batchsim.workload.lengths import Lengths
from batchsim.workload.processes import PoissonArrivals
from batchsim.workload.workload_config import WorkloadConfig

SMALL: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "cost": "h200",
    "workload": {
        "arrivals": {"kind": "poisson", "mean_rate": "2/s"},
        "lengths": {"prompt": {"kind": "fixed", "tokens": 200}, "output": {"kind": "fixed", "tokens": 20}},
        "output_cap": 32,
        "duration": "20s",
    },
    "policies": {"continuous": {"max_num_seqs": 16, "max_num_batched_tokens": 2048}},
    "load": {"mean_rate": ["1/s", "4/s"]},
    "slo": "ttft<1s & tpot<50ms @ 99%",
}


@pytest.mark.parametrize("name", shipped_scenarios())
def test_a_shipped_scenario_written_out_is_itself(name: str) -> None:
    """Its configs as typed objects give the same file again, units, defaults, kinds and all."""
    file = load_scenario(name).file
    keys = {field.name: getattr(file, field.name) for field in fields(file)}
    keys = {key: value for key, value in keys.items() if value is not None}
    assert scenario(**keys).file == file


def test_typed_objects_and_a_mapping_are_one_scenario() -> None:
    """Objects with texts of quantities, positions and defaults left out say what the mapping says."""
    typed = scenario(
        model="llama-3.1-8b",
        cost="h200",
        workload=WorkloadConfig(
            PoissonArrivals("2/s"),  # type: ignore[arg-type]
            32,
            lengths=Lengths(FixedTokens(200), FixedTokens(20)),
            duration="20s",  # type: ignore[arg-type]
        ),
        policies={"continuous": ContinuousConfig(max_num_seqs=16, max_num_batched_tokens=2048)},
        load={"mean_rate": ["1/s", "4/s"]},
        slo="ttft<1s & tpot<50ms @ 99%",
    )
    plain = scenario(SMALL)
    assert (typed.file.workload, typed.loads) == (plain.file.workload, (1.0, 4.0))
    assert [spec.config for spec in typed.specs] == [spec.config for spec in plain.specs]
    assert typed.file.workload.duration == 20_000_000_000


def test_a_mapping_is_what_its_file_is(tmp_path: Path) -> None:
    """The scenario of a YAML file and that of its values differ in where they stand only."""
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    assert scenario(tmp_path / "small.yaml").file == scenario(SMALL).file


def test_what_is_written_is_read_as_the_same_number() -> None:
    """Every digit, also where a percentage or a factor of 1e9 rounds."""
    shares = [parse_share(f"{number / 7}%") for number in range(700)]
    numbers = [(Share, share) for share in shares] + [(Rate, 1 / 3), (Flops, 989.4e12), (Duration, 2**53)]
    for kind, number in numbers:
        quantity = TypeAdapter(kind)
        assert isinstance(quantity.dump_python(number, mode="json"), str)
        assert quantity.validate_json(quantity.dump_json(number)) == number


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"slo": None}, "scenario: slo is missing. Add it."),
        ({"seeds": 0}, "scenario: seeds is 0. It must be from 1 to 1000000."),
        ({"sedes": 1}, "scenario: sedes is not a field of a scenario. Did you mean seeds?"),
        ({"seeds": {1}}, "scenario: seeds is of type set, which no scenario holds. Write numbers, texts, lists,"),
        ({"kv": {1: 2}}, "scenario: kv has the key 1, which is no text. Write it as a text."),
    ],
)
def test_a_wrong_mapping_is_told_in_a_line_without_line_numbers(change: dict[str, Any], said: str) -> None:
    """As of a file, but for lines, which nobody wrote."""
    wrong = {key: value for key, value in (SMALL | change).items() if value is not None}
    with pytest.raises(ScenarioError) as found:
        scenario(wrong)
    assert str(found.value).startswith(said)
    assert "\n" not in str(found.value)


def test_keys_beside_a_file_are_refused() -> None:
    """They would be read by nobody."""
    with pytest.raises(ScenarioError, match=r"^Scenario: seeds, kv beside bursty, which has keys of its own\."):
        scenario("bursty", seeds=1, kv=KvConfig(tokens=1000))
    with pytest.raises(ScenarioError, match=r"^Scenario: name 'mine' beside bursty"):
        scenario("bursty", name="mine")
    with pytest.raises(ScenarioError, match=r"^Scenario: name '\.\.' is no name of a folder\."):
        scenario(SMALL, name="..")


def test_a_typed_object_says_at_once_what_is_wrong() -> None:
    """A text without a unit or out of range is refused where it is written, by the field's name."""
    with pytest.raises(ValueError, match=r"^mean_rate: '8' has no known unit of a rate\."):
        PoissonArrivals("8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^mean_rate is 2e\+06/s\. It must be from 1e-06/s to 1e\+06/s\."):
        PoissonArrivals("2000000/s")  # type: ignore[arg-type]
