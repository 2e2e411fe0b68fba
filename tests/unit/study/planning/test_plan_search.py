"""A plan that searches: the space, halving on hand-made configurations, looks that rule out, the manifest."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import typer
import yaml
from typer.testing import CliRunner

from batchsim.base.errors import ScenarioError
from batchsim.report.page.plan_page import MANIFEST, write_report
from batchsim.report.page.plan_sections import sections
from batchsim.report.page.plan_text import plan_text
from batchsim.report.sheet import Table
from batchsim.scenario import Scenario, load_scenario
from batchsim.study.planning.demand import Variation, demand_of
from batchsim.study.planning.fleet_search import SmallestGroup, smallest
from batchsim.study.planning.halving import Halving, Look
from batchsim.study.planning.make import GROWN, TURNED, make_plan
from batchsim.study.planning.money import Bought, cost_per_month, gpu_price_at
from batchsim.study.planning.plan_tables import plan_tables
from batchsim.study.planning.probe import Ask, Book, GpuGroup, GroupProbe, Observed, drive
from batchsim.study.planning.searched import hopeless
from batchsim.study.planning.space import space_of
from batchsim.study.planning.tables import Tables, tables_of
from batchsim.study.sweep.points import Sweep
from tests import search_check

SEARCHED = """\
model: llama-3.1-8b
cost: {kind: linear, base: 5ms, per_sequence: 5ms}
workload:
  arrivals: {kind: poisson, mean_rate: 20/s}
  lengths: {prompt: {kind: fixed, tokens: 100}, output: {kind: uniform, min: 2, max: 12}}
  output_cap: 16
  duration: 4s
policies:
  continuous: {max_num_seqs: 4, max_num_batched_tokens: 256}
slo: ttft<1s @ 90%
seeds: 3
plan:
  target: {rate: 60/s}
  window: 4s
  currency: $
  gpus:
    own:
      price: 2.00/h
      deployment:
        engine: vllm
        gpu: {kind: sheet, memory: 80GB, bandwidth: 3350GB/s, bf16: 989TFLOP/s, peer_link: 450GB/s}
    slow: {price: 1.00/h, kv_tokens: 16000, cost: {kind: linear, base: 40ms, per_sequence: 2ms}}
  router: least_tokens
  max_replicas: 6
  free: {gpu: [own], max_num_seqs: [2, 64], router: [least_tokens, round_robin], tp: [1, 2]}
"""


@pytest.fixture
def searched(tmp_path: Path) -> Scenario:
    (tmp_path / "s.yaml").write_text(SEARCHED.replace("continuous: {", "vllm: {enable_prefix_caching: false, "))
    return load_scenario(str(tmp_path / "s.yaml"))


def with_free(scenario: Scenario, text: str) -> Scenario:
    return load_scenario(scenario.source, overrides=[f"plan.free={text}"])


def test_the_space_is_every_combination(searched: Scenario) -> None:
    """In the order of the lists; what is not free stays as written; a GPU's count of engines goes into its price."""
    space = space_of(searched)
    assert len(space.groups) == 8 and len(set(space.groups)) == 8
    assert space.groups[0].name == "vllm: max_num_seqs 2, router least_tokens, tp 1"
    assert len(space_of(with_free(searched, "{max_num_seqs: [2, 64]}")).groups) == 4
    book = Book(demand_of(searched), Sweep(Path(searched.source).parent / "r"))
    wide = next(group for group in space.groups if ("tp", "2") in group.knobs)
    assert book.offer(wide).gpus == 2 and book.offer(space.groups[0]).gpus == 1
    setup = book.setup(Ask(replace(wide, replicas=3)))
    assert setup.scenario.file.replicas is not None and setup.scenario.file.replicas.count == 3
    assert setup.num_gpus == 2 and setup.scenario.specs[0].config.traits.max_num_seqs == 2


@pytest.mark.parametrize(
    ("free", "said"),
    [
        ("{max_seqs: [1]}", "plan.free: max_seqs: vllm has no such knob. Did you mean max_num_seqs"),
        ("{gpu: [h900]}", "plan.free: gpu has h900, which the scenario has not"),
        ("{policy: [orca]}", "plan.free: policy has orca"),
        ("{router: [nobody]}", "there is no such router"),
        ("{tp: [1, 2]}", "tp: the cost of slow is of kind linear and has no tp"),
        ("{max_num_seqs: [0]}", "plan.free: max_num_seqs, value 0:"),
        ("{max_num_seqs: []}", "free.max_num_seqs is empty"),
        ("{max_num_seqs: [8, 8]}", "free.max_num_seqs has 8 twice"),
        ("{max_num_seqs: [[4, 8]]}", "max_num_seqs is [4, 8]. Write a whole number."),
    ],
)
def test_what_cannot_be_free_is_one_line(searched: Scenario, free: str, said: str) -> None:
    with pytest.raises(ScenarioError) as error:
        space_of(with_free(searched, free))
    assert said in str(error.value) and "\n" not in str(error.value)


TIERED = """\
model: llama-3.1-8b
cost: {kind: roofline, gpu: h100}
kv: {tiers: [{kind: host, size: 64GB}]}
workload:
  arrivals: {kind: poisson, mean_rate: 2/s}
  sessions: {turns: {kind: fixed, tokens: 4}, think_time: 2s}
  lengths: {prompt: {kind: fixed, tokens: 1500}, output: {kind: fixed, tokens: 4}}
  output_cap: 8
  duration: 10s
policies:
  vllm: {}
  continuous: {max_num_seqs: 4, max_num_batched_tokens: 4096}
slo: ttft<2s @ 50%
seeds: 2
plan:
  target: {rate: 2/s}
  window: 10s
  currency: $
  gpus: {h: {price: 2.00/h, kv_tokens: 40000, cost: {kind: roofline, gpu: h100}}}
  router: least_tokens
  max_replicas: 3
  host_memory_price: 1.50/GB/month
  free: {policy: [vllm], kv.tiers.0.size: [2GB, 64GB]}
"""


def tiered(folder: Path, *overrides: str, text: str = TIERED) -> Scenario:
    (folder / "t.yaml").write_text(text)
    return load_scenario(str(folder / "t.yaml"), overrides=overrides)


def test_sizes_of_tiers_are_searched_at_their_price(tmp_path: Path) -> None:
    """A replica of a configuration costs its GPU and as many GB of its host as it takes, stated or chosen; the setup
    has that tier, and whole tiers may be chosen too, or none."""
    scenario = tiered(tmp_path)
    groups, book = space_of(scenario).groups, Book(demand_of(scenario), Sweep(tmp_path / "r"))
    assert [group.name for group in groups] == ["vllm: kv.tiers.0.size 2GB", "vllm: kv.tiers.0.size 64GB"]
    months = [cost_per_month(book.offer(group), 3) for group in groups]
    assert months == pytest.approx([3 * (2 * 730 + 2 * 1.5), 3 * (2 * 730 + 64 * 1.5)])
    tier = book.setup(Ask(replace(groups[0], replicas=3))).groups[0].setup.tier
    assert tier is not None and tier.vllm is not None and tier.vllm.config.size == 2 * 10**9
    whole = tiered(tmp_path, "plan.free={policy: [vllm], kv.tiers: [[], [{kind: host, size: 8GB}]]}")
    book, groups = Book(demand_of(whole), Sweep(tmp_path / "r")), space_of(whole).groups
    assert [book.offer(group).memory * 730 for group in groups] == pytest.approx([0, 12])
    assert book.setup(Ask(groups[0])).tier is None and book.setup(Ask(groups[1])).tier is not None
    stated = tiered(tmp_path, "plan.free={policy: [vllm], max_num_seqs: [64, 128]}")
    group = space_of(stated).groups[0]
    assert Book(demand_of(stated), Sweep(tmp_path / "r")).offer(group).memory * 730 == pytest.approx(96)


@pytest.mark.parametrize(("policy", "knobs"), [("sglang", ""), ("tensorrt_llm", "enable_chunked_prefill: true")])
def test_sizes_of_every_engine_are_searched(tmp_path: Path, policy: str, knobs: str) -> None:
    """As vLLM's; of two sizes that hold alike the smaller one."""
    text = TIERED.replace("vllm: {}", f"{policy}: {{{knobs}}}").replace("[vllm]", f"[{policy}]")
    planned = make_plan(tiered(tmp_path, "plan.target.rate=8/s", text=text), Sweep(tmp_path / "r"))
    (row,) = tables_of(planned)["recommendation"]
    assert row["policy"] == f"{policy}: kv.tiers.0.size 2GB"
    assert row["cost_per_month"] == pytest.approx(row["replicas"] * (2 * 730 + 2 * 1.5))


def test_a_ratio_has_no_price(tmp_path: Path) -> None:
    """SGLang's own measure of its host depends on the GPU: a plan that pays for memory needs its size."""
    text = TIERED.replace("vllm: {}", "sglang: {}").replace("[vllm]", "[sglang]").replace("size: 64GB", "ratio: 2")
    scenario = tiered(tmp_path, "plan.free={policy: [sglang], kv.tiers.0.ratio: [1, 2]}", text=text)
    with pytest.raises(ScenarioError, match=r"host_memory_price needs the size of kv\.tiers"):
        make_plan(scenario, Sweep(tmp_path / "r"))


def test_the_price_of_a_gpu_beside_memory() -> None:
    """2 replicas of 4 GPUs and memory for 1 an hour cost 18 an hour where a GPU costs 2; memory alone costs 2."""
    bought = Bought(3.0, 4, 1.0)
    assert gpu_price_at(bought, 2, 18.0) == 2.0
    assert gpu_price_at(bought, 2, 2.0) == 0.0 and gpu_price_at(bought, 2, 1.9) is None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["plan.free={policy: [vllm, continuous], kv.tiers.0.size: [2GB]}"],
            "plan.free: kv.tiers.0.size: continuous is of kind continuous, and only tiers of vllm, sglang, tens",
        ),
        (
            ["kv.tiers=[]"],
            "plan.free: kv.tiers.0.size: the scenario has no kv.tiers. Write kv: {tiers: [{kind: host,",
        ),
        (["plan.free={policy: [vllm], kv.tiers.0.sise: [2GB]}"], 'plan.free: kv.tiers.0.sise, value "2GB": '),
        (["plan.free={policy: [vllm], kv.tiers.1.size: [2GB]}"], 'plan.free: kv.tiers.1.size, value "2GB": '),
        (["plan.free={policy: [vllm], kv.tiers.0.size: [2]}"], "plan.free: kv.tiers.0.size, value 2: "),
        (["plan.host_memory_price=null"], "none is stated. Write plan.host_memory_price: 1.50/GB/month"),
    ],
)
def test_what_tiers_cannot_be_free_is_one_line(tmp_path: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ScenarioError) as error:
        space_of(tiered(tmp_path, *overrides))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_price_of_memory_needs_tiers(tmp_path: Path) -> None:
    scenario = tiered(tmp_path, "kv.tiers=[]", "plan.free={policy: [vllm], max_num_seqs: [8, 64]}")
    with pytest.raises(ScenarioError, match=r"plan\.host_memory_price is the price of kv\.tiers, .* has none"):
        make_plan(scenario, Sweep(tmp_path / "r"))


def test_a_plan_names_the_tier_that_it_chose(tmp_path: Path) -> None:
    """Of two sizes that hold alike the smaller one, which is cheaper, over several replicas with sessions too."""
    planned = make_plan(tiered(tmp_path, "plan.target.rate=8/s"), Sweep(tmp_path / "r"))
    (row,) = tables_of(planned)["recommendation"]
    assert row["policy"] == "vllm: kv.tiers.0.size 2GB"
    assert row["cost_per_month"] == pytest.approx(row["replicas"] * (2 * 730 + 2 * 1.5))


# ---- halving, on configurations of which all is known


class Known:
    """Configurations that need so many replicas; a short look rules out `lenient` fewer than that."""

    def __init__(self, needs: list[int], lenient: int, broken: tuple[int, ...] = ()) -> None:
        self.needs, self.lenient, self.broken = needs, lenient, broken
        self.last_looks: list[tuple[int, int]] = []

    def __call__(self, rung: int, wanted: list[tuple[int, int]]) -> list[Look]:
        if rung == 2:
            self.last_looks += wanted
        return [
            Look(False, failed="no profile")
            if i in self.broken
            else Look(replicas >= self.needs[i] - (self.lenient if rung < 2 else 0), replicas / self.needs[i])
            for i, replicas in wanted
        ]


@pytest.mark.parametrize("lenient", [0, 1, 3])
def test_the_winner_is_that_of_looking_at_all(lenient: int) -> None:
    """Whatever the short looks let pass, the cheapest that holds is found, with few long looks."""
    rng = np.random.default_rng([17, lenient])
    for _ in range(50):
        needs = rng.integers(1, 14, 60).tolist()
        prices = rng.choice([1.0, 2.5, 4.0, 7.0], 60).tolist()
        known = Known(needs, lenient)
        halving = Halving(prices, 12, 3, known, pilots=(0, 1), guess=4)
        best = halving.run()
        costs = [price * need for price, need in zip(prices, needs, strict=True) if need <= 12]
        assert best is not None and prices[best] * needs[best] == min(costs)
        assert halving.states[best].held == needs[best]
        assert len({i for i, _ in known.last_looks}) < 45


def test_a_patient_objective_is_not_climbed_to_by_single_replicas() -> None:
    """Where short looks rule nothing out, the last rung leaps and halves; the winner and its replicas are the same."""
    rng = np.random.default_rng(8)
    for _ in range(50):
        needs = rng.integers(24, 65, 30).tolist()
        prices = rng.choice([1.0, 2.5, 4.0], 30).tolist()
        known = Known(needs, lenient=64)
        halving = Halving(prices, 64, 3, known, pilots=(0, 1), guess=4)
        best = halving.run()
        costs = [price * need for price, need in zip(prices, needs, strict=True)]
        assert best is not None and costs[best] == min(costs) and halving.states[best].held == needs[best]
        assert all(state.held in (None, need) for state, need in zip(halving.states, needs, strict=True))
        pilots = [replicas for i, replicas in known.last_looks if i == 0]
        assert len(pilots) == len(set(pilots)) <= 2 * np.log2(64) + 1
        singly = [min(need, int(min(costs) / price)) for price, need in zip(prices, needs, strict=True)]
        assert len(known.last_looks) < sum(singly) / 2


def test_what_cannot_be_built_and_what_never_holds_is_told_apart() -> None:
    """A broken pilot is no obstacle; where nothing holds there is no winner."""
    halving = Halving([1.0, 1.0, 5.0], 4, 3, Known([1, 3, 1], 0, broken=(0,)), pilots=(0, 1))
    assert halving.run() == 1
    assert [state.out for state in halving.states] == ["failed", "", "price"]
    nothing = Halving([1.0, 1.0], 4, 3, Known([9, 9], 0))
    assert nothing.run() is None and [state.out for state in nothing.states] == ["limit", "limit"]


def test_a_short_look_is_the_beginning_of_the_long_one(searched: Scenario, tmp_path: Path) -> None:
    """The same requests at the same times: what it shows missed is missed in the long run too."""
    book = Book(demand_of(searched), Sweep(tmp_path / "r"))
    group = space_of(searched).groups[0]
    found = []
    for window in (0.5, 1.0):
        setup = book.setup(Ask(group, Variation(window=window)))
        found.append(setup.workload(setup.scenario.loads[0], 1).columns())
    count = len(found[0]["sent_ns"])
    assert 80 < count < len(found[1]["sent_ns"]) - 80
    for name, values in found[0].items():
        assert np.array_equal(values, found[1][name][:count]), name


def test_a_look_rules_out_what_the_rest_of_the_window_cannot_make_up_for(searched: Scenario, tmp_path: Path) -> None:
    """Half of the window with 24 % of misses cannot become 90 % in the whole, as 18 % may."""
    book = Book(demand_of(searched), Sweep(tmp_path / "r"))
    result = {"values": {"cohort": 100}}

    def look(share: float, window: float) -> bool:
        ask = Ask(GpuGroup("own", "vllm", 1), Variation(window=window))
        return hopeless(book, GroupProbe(ask, (result,), (Observed(share, share - 0.9, {}),), complete=False))

    assert look(0.76, 0.5) and not look(0.82, 0.5)
    assert look(0.89, 1.0) and not look(0.91, 1.0)


# ---- the whole


def test_a_plan_that_searches_ends_with_command_and_manifest(searched: Scenario, tmp_path: Path) -> None:
    """The winner is as cheap as any that holds; the manifest is YAML of as many replicas, with the command's words."""
    searched = load_scenario(searched.source, overrides=["plan.window=1s", "seeds=2"])
    tables = plan_tables(searched, out=tmp_path / "results")
    (chosen,) = tables["recommendation"]
    costs = [row["cost_per_month"] for row in tables["configurations"] if row["holds"]]
    assert chosen["cost_per_month"] == min(costs)
    assert len(tables["searched"]) == 8 and tables["searched"][0]["why_lost"] == ""
    assert all(row["why_lost"] for row in tables["searched"][1:])
    text = plan_text(tables, "$")
    assert "searched 8 configurations" in text and "30 % more traffic: " in text
    files = write_report(tables, "s", "$", tmp_path / "plan")
    written = next(file for file in files if file.name == MANIFEST)
    deployment, service = yaml.safe_load_all(written.read_text())
    assert deployment["spec"]["replicas"] == chosen["replicas"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"][:1] == ["meta-llama/Llama-3.1-8B"] and "--max-num-seqs" in container["args"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    page = (tmp_path / "plan" / "report.html").read_text()
    assert "What would change the decision" in page and "How it was found" in page
    frontier = tables["pareto"]
    assert all(one["cost_per_month"] < two["cost_per_month"] for one, two in pairwise(frontier))
    assert all(one["attainment"] < two["attainment"] for one, two in pairwise(frontier))


def test_of_one_price_headroom_decides_whoever_waited(searched: Scenario) -> None:
    """Five narrow and five wide engines hold today's traffic without a miss, the narrow ones first in the space, the
    last wide one waiting. A short look with more traffic names those of which headroom decides: a wide one wins."""
    free = "{gpu: [own], max_num_seqs: [7, 64], max_num_batched_tokens: [512, 1024, 2048, 4096, 8192]}"
    changes = ["slo=ttft<60ms @ 90%", "plan.target.rate=100/s", "plan.window=1s", "seeds=2", f"plan.free={free}"]
    scenario = load_scenario(searched.source, overrides=changes)
    tables = plan_tables(scenario, out=Path(searched.source).parent / "results")
    rows = tables["configurations"]
    assert len({(row["replicas"], row["margin_low"]) for row in rows}) == 1 and len(rows) == 4
    room = {row["policy"]: row["headroom"] for row in rows}
    assert {"max_num_seqs 7," in policy: held for policy, held in room.items()} == {True: 0, False: pytest.approx(0.3)}
    winner = tables["recommendation"][0]["policy"]
    assert "max_num_seqs 64," in winner
    assert tables["searched"][0]["policy"] == winner
    why = {row["policy"]: row["why_lost"] for row in tables["searched"][1:]}
    narrow = next(policy for policy in room if "max_num_seqs 7," in policy)
    assert why[narrow] == "holds at the same price, with headroom of 0 % where the winner has 30 %"
    other = (
        "holds at the same price, and in a short look with 30 % more traffic did no better than those whose headroom"
    )
    assert {f"{other} was looked at"} == {why[policy] for policy in set(why) - set(room)}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """The tables of a search of four configurations."""
    folder = tmp_path_factory.mktemp("four")
    (folder / "s.yaml").write_text(SEARCHED.replace("continuous: {", "vllm: {enable_prefix_caching: false, "))
    overrides = [
        "plan.free={gpu: [own], max_num_seqs: [2, 64], router: [least_tokens, round_robin]}",
        "plan.window=1s",
        "seeds=2",
    ]
    return plan_tables(load_scenario(str(folder / "s.yaml"), overrides=overrides), out=folder / "results")


def how_it_was_found(tables: Tables) -> list[Table]:
    shown = sections(tables | {"glossary": []}, "$", {})
    return next(section.views for section in shown if section.title == "How it was found")


def test_the_counts_of_a_search_add_up_and_say_why(four: Tables) -> None:
    """All enter the first rung; who is not left on a rung enters the next, and every one that is left has a reason."""
    rungs = four["search"]
    assert rungs[0]["entered"] == len(four["searched"]) == 4
    for one, two in pairwise(rungs):
        assert one["entered"] - one["ruled_out"] - one["waiting"] == two["entered"]
    counts = [sum(map(int, re.findall(r"(?:^|; )(\d+) ", row["why_left"]))) for row in rungs]
    assert sum(counts) == 4 and counts[-1] == rungs[-1]["entered"]
    assert "shown to hold" in rungs[-1]["why_left"]
    assert all(row["why_left"] in " ".join(plan_text(four, "$").split()) for row in rungs)
    for row, cells in zip(rungs, how_it_was_found(four)[0].rows, strict=True):
        assert {row["what"], row["why_left"] or "–"} <= {cell.text for cell in cells}


def test_one_replica_is_one_group_whatever_the_router(four: Tables) -> None:
    """Each configuration has a name of its own, and those that are the same group are told and shown once."""
    rows = four["searched"]
    assert len({(row["gpu"], row["policy"]) for row in rows}) == len(rows) == 4
    twins = [row for row in rows if row["twin"]]
    assert twins and all("router " in row["policy"] and "needs no router" in row["why_lost"] for row in twins)
    shown = [row[1].text for row in how_it_was_found(four)[1].rows]
    assert shown == [row["policy"] for row in rows if not row["twin"]]
    assert not any(row["policy"] in plan_text(four, "$") for row in twins)


def test_the_check_of_the_search_takes_its_scenario_as_an_argument() -> None:
    """As its docstring calls it; it was taken for an option."""
    app = typer.Typer()
    app.command()(search_check.main)
    done = CliRunner().invoke(app, ["nowhere.yaml", "--draws", "1"])
    assert done.exit_code == 2 and "nowhere.yaml: no such scenario" in done.stderr


@pytest.mark.slow
def test_what_changes_the_decision_is_what_looking_at_everything_says(searched: Scenario, tmp_path: Path) -> None:
    """For each change the price of the cheapest that holds, by a search of every configuration by itself; with less
    traffic it is another than the one with most headroom. Judged anew are also some that the plan did not go on with,
    and no contender is asked for more than costs as much as the winner.
    """
    overrides = ["slo=ttft<100ms & tpot<30ms @ 90%", "plan.target.rate=450/s", "plan.window=1s"]
    free = "{gpu: [own], max_num_seqs: [16, 64], max_num_batched_tokens: [128, 256, 512]}"
    scenario = load_scenario(searched.source, overrides=[*overrides, f"plan.free={free}"])
    planned = make_plan(scenario, Sweep(tmp_path / "points"))
    assert planned.searched is not None and planned.best is not None
    book, space, finalists = planned.book, planned.searched.space, planned.searched.finalists
    winner = finalists[planned.best]
    rows = {row["change"]: row for row in tables_of(planned)["sensitivity"]}
    assert rows[GROWN]["same_decision"] is True and rows["30 % less traffic"]["same_decision"] is False
    assert {i for i, _ in planned.turned} - set(finalists)
    for name, change in TURNED.items():
        every = drive(book, [smallest(book, group, 6, change) for group in space.groups])
        costs = [month for found in every if (month := cost(book, found)) is not None]
        assert rows[name]["cost_per_month"] == min(costs)
        own = cost(book, planned.turned[winner, name])
        for (_, turned), found in planned.turned.items():
            if turned == name and own is not None and (month := cost(book, found)) is not None:
                assert month <= own


def test_what_was_too_dear_to_look_at_and_cannot_be_built_is_no_contender(searched: Scenario, tmp_path: Path) -> None:
    """Of 3 GPUs that cannot share the heads, which more traffic would pay for."""
    free = "{gpu: [own], max_num_seqs: [64], tp: [1, 3]}"
    overrides = ["slo=ttft<100ms & tpot<30ms @ 90%", "plan.target.rate=470/s", "plan.window=1s", f"plan.free={free}"]
    planned = make_plan(load_scenario(searched.source, overrides=overrides), Sweep(tmp_path / "points"))
    assert planned.searched is not None
    states, winner = planned.searched.halving.states, planned.searched.best
    dear = [i for i, state in enumerate(states) if state.out == "price"]
    assert len(dear) == 1 and not {*dear} & {*planned.searched.contenders, *planned.searched.finalists}
    assert winner is not None
    grown = planned.turned[winner, GROWN]
    assert grown.group is not None and grown.group.replicas >= 3 > states[winner].replicas


def cost(book: Book, found: SmallestGroup) -> float | None:
    return None if found.group is None else cost_per_month(book.offer(found.group), found.group.replicas)
