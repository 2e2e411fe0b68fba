"""Whatever a user gets wrong: exit code 2, one line on stderr that says what to do, and nothing left in the folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from batchsim.base.errors import _without
from tests.support.tiny_scenario import REPLAY, TINY, batchsim, changed, listing

SETS_OWN_SHARE = "slo: ttft<1s & tpot<50ms @ 99%"
STATIC = "static: {batch_size: 4, max_wait: 100ms}"
CONTINUOUS = "continuous: {max_num_seqs: 8, max_num_batched_tokens: 512}"
ARRIVALS = "{kind: poisson, mean_rate: 20/s}"
LOAD = "load: {mean_rate: [10/s, 20/s]}\n"
MEMORY = "kv: {tokens: 16000}"
CONSTANT = "{kind: constant, step: 10ms}"
CLOSED = "{kind: closed_loop, users: 3, think_time: 1s}"
OWN_CLASS = "  requests: 40\n  classes: {a: {share: %s}}\n"


def refused(folder: Path, args: list[object], *expected: str) -> None:
    """Asserts the contract of a bad input, and that the line says each of `expected`."""
    before = listing(folder)
    result = batchsim(*args)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr) > 20
    for text in expected:
        assert text in result.stderr
    assert listing(folder) == before


# name: what of the tiny scenario is replaced, by what, and what the line says
KEYS = {
    "key_misspelt_at_top": ("slo:", "slos:", "s.yaml:15: slos is not a field", "Did you mean slo?"),
    "key_unknown_at_top": ("seeds: 2", "seeds: 2\ncolour: red", "s.yaml:17: colour is not a field"),
    "knob_misspelt": ("max_num_seqs", "max_num_seq", "s.yaml:13: policies.continuous.max_num_seq", "max_num_seqs?"),
    "knob_missing": ("max_num_seqs: 8, ", "", "s.yaml:13", "max_num_seqs is missing"),
    "workload_key_misspelt": ("output_cap:", "ouput_cap:", "s.yaml:9", "Did you mean output_cap?"),
    "arrivals_key_misspelt": ("mean_rate: 20/s", "mean_rte: 20/s", "s.yaml:5", "Did you mean mean_rate?"),
    "length_key_misspelt": ("tokens: 100", "token: 100", "s.yaml:7", "Did you mean tokens?"),
    "kv_key_misspelt": ("tokens: 16000", "token: 16000", "s.yaml:3", "Did you mean tokens?"),
    "load_key_misspelt": ("load: {mean_rate", "load: {mean_rates", "s.yaml:14", "Did you mean mean_rate?"),
    "cost_key_misspelt": ("step: 10ms", "steps: 10ms", "s.yaml:2", "Did you mean step?"),
    "key_given_twice": ("seeds: 2", "seeds: 2\nseeds: 3", "s.yaml:17: seeds is given twice"),
    "key_is_a_list": ("seeds: 2", "? [a, b]\n: 2", "a key is not a word"),
    "model_missing": ("model: llama-3.1-8b\n", "", "model is missing"),
    "slo_missing": ("slo: ttft<1s & tpot<50ms @ 99%\n", "", "slo is missing"),
    "workload_missing_arrivals": ("  arrivals: {kind: poisson, mean_rate: 20/s}\n", "", "workload.arrivals is missing"),
}
VALUES = {
    "seeds_as_word": ("seeds: 2", "seeds: two", "s.yaml:16: seeds is", "a whole number"),
    "seeds_as_float": ("seeds: 2", "seeds: 2.5", "seeds is 2.5"),
    "seeds_quoted": ("seeds: 2", "seeds: '2'", "seeds is"),
    "seeds_zero": ("seeds: 2", "seeds: 0", "s.yaml:16: seeds is 0", "from 1 to"),
    "seeds_huge_number": ("seeds: 2", "seeds: 99999999999999999999999", "seeds is"),
    "model_is_a_list": ("model: llama-3.1-8b", "model: [llama]", "s.yaml:1: model is"),
    "workload_is_a_word": (ARRIVALS, "poisson", "s.yaml:5"),
    "policies_is_a_list": (f"{STATIC}\n  {CONTINUOUS}", "- static", "policies"),
    "policies_is_a_word": (f"\n  {STATIC}\n  {CONTINUOUS}", " static", "policies"),
    "policy_is_a_number": (STATIC, "static: 4", "s.yaml:12", "static"),
    "policies_empty": (f"\n  {STATIC}\n  {CONTINUOUS}", " {}", "policies is empty"),
    "rate_without_unit": ("mean_rate: 20/s", "mean_rate: 20", "s.yaml:5", "like 8/s"),
    "time_without_unit": ("max_wait: 100ms", "max_wait: 100", "s.yaml:12", "like 50ms"),
    "time_of_unknown_unit": ("max_wait: 100ms", "max_wait: 100 fortnights", "s.yaml:12", "ns, us, ms, s, min, h"),
    "time_as_rate": ("step: 10ms", "step: 10/s", "s.yaml:2"),
    "rate_negative": ("mean_rate: 20/s", "mean_rate: -20/s", "above 0"),
    "rate_infinite": ("mean_rate: 20/s", "mean_rate: 1e999/s", "s.yaml:5"),
    "rate_too_high": ("mean_rate: 20/s", "mean_rate: 1e9/s", "to 1e+06/s"),
    "time_negative": ("max_wait: 100ms", "max_wait: -1s", "negative"),
    "length_negative": ("tokens: 100", "tokens: -5", "from 1 to"),
    "length_nan": ("min: 2", "min: .nan", "min"),
    "cv_nan": (ARRIVALS, "{kind: gamma, mean_rate: 20/s, cv: NaN}", "cv"),
    "cv_infinite": (ARRIVALS, "{kind: gamma, mean_rate: 20/s, cv: 1e999}", "cv"),
    "cv_negative": (ARRIVALS, "{kind: gamma, mean_rate: 20/s, cv: -1}", "cv"),
    "length_range_reversed": ("max: 12", "max: 1", "below min"),
    "requests_zero": ("requests: 40", "requests: 0", "s.yaml:10: ", "from 1 to"),
    "both_ends": ("requests: 40", "requests: 40\n  duration: 10s", "both duration and requests"),
    "no_end": ("  requests: 40\n", "", "have no end"),
    "warmup_too_long": ("requests: 40", "duration: 10s\n  warmup: 10s", "warmup 10 s leaves nothing"),
    "output_cap_missing": ("  output_cap: 16\n", "", "output_cap is missing"),
    "output_cap_word": ("output_cap: 16", "output_cap: lots", "output_cap"),
    "shares_do_not_add_up": ("  requests: 40\n", OWN_CLASS % "50%", "add up to 50%"),
    "share_above_one": ("  requests: 40\n", OWN_CLASS % "150%", "from 0% to 100%"),
    "class_slo_wrong": ("  requests: 40\n", "  requests: 40\n  classes: {a: {share: 100%, slo: fast}}\n", "slo 'fast'"),
    "utilisation_without_percent": (MEMORY, "kv: {tokens: 16000, utilisation: 90}", "90%"),
    "block_size_zero": (MEMORY, "kv: {tokens: 16000, block_size: 0}", "from 1 to"),
    "kv_smaller_than_a_block": (MEMORY, "kv: {tokens: 8}", "at least one block"),
    "label_of_a_formula": (CONTINUOUS, '"$x": {kind: gated}', "s.yaml:13: ", "without $"),
    "label_blank": (CONTINUOUS, '" ": {kind: gated}', "s.yaml:13: ", "not blank"),
    "predictor_nobody_asks": (CONTINUOUS, "gated: {predictor: {kind: oracle}}", "s.yaml:13: ", "Remove its predictor"),
    "swap_space_nobody_uses": (MEMORY, "kv: {tokens: 16000, swap_space: 1GB}", "s.yaml:3: ", "no policy swaps"),
    "max_waiting_zero": ("seeds: 2", "seeds: 2\nmax_waiting: 0", "max_waiting is 0"),
    "max_model_len_above_the_models": ("seeds: 2", "seeds: 2\nmax_model_len: 999999", "131072", "Lower it"),
}
NAMES = {
    "model_unknown": ("llama-3.1-8b", "lama-3.1-8b", "s.yaml:1: ", "Did you mean llama-3.1-8b?"),
    "model_unlike_any": ("llama-3.1-8b", "zzz", "Known are"),
    "gpu_unknown": (CONSTANT, "h20", "s.yaml:2: ", "Did you mean h200?"),
    "gpu_unlike_any": (CONSTANT, "cerebras", "Known are"),
    "cost_kind_unknown": (CONSTANT, "{kind: roofine, gpu: h200}", "roofline"),
    "cost_without_kind": (CONSTANT, "{gpu: h200}", "kind"),
    "policy_unknown": (CONTINUOUS, "continous: {max_num_seqs: 8}", "s.yaml:13", "Did you mean continuous?"),
    "policy_kind_unknown": (CONTINUOUS, "mine: {kind: zzz}", "s.yaml:13", "Known are"),
    "policy_kind_a_number": (CONTINUOUS, "mine: {kind: 3}", "Write the name of a policy"),
    "arrivals_kind_unknown": ("kind: poisson", "kind: poison", "Did you mean poisson?"),
    "arrivals_without_kind": (ARRIVALS, "{mean_rate: 20/s}", "kind"),
    "length_kind_unknown": ("kind: uniform", "kind: unifrom", "Did you mean uniform?"),
    "model_does_not_fit": (
        f"llama-3.1-8b\ncost: {CONSTANT}\n{MEMORY}",
        "llama-3.1-70b\ncost: l40s",
        "s.yaml:2: ",
        "GB short",
        "tp: 4",
    ),
    "tp_that_divides_nothing": (f"{CONSTANT}\n{MEMORY}", "{kind: roofline, gpu: h200, tp: 3}", "3"),
    "no_memory_stated": (MEMORY + "\n", "", "Add kv: tokens"),
}
SENSE = {
    "static_waits_for_more_than_the_users": (
        f"{ARRIVALS}",
        CLOSED,
        "load.mean_rate does not fit",
    ),
    "load_axis_wrong": (
        "load: {mean_rate: [10/s, 20/s]}",
        "load: {users: [1, 2]}",
        "s.yaml:14: ",
        "does not fit",
        "poisson",
        "mean_rate: [...]",
    ),
    "load_two_axes": ("load: {mean_rate: [10/s, 20/s]}", "load: {mean_rate: [1/s], users: [1]}", "one list"),
    "load_empty": ("[10/s, 20/s]", "[]", "at least one value"),
    "load_not_increasing": ("[10/s, 20/s]", "[20/s, 10/s]", "increase"),
    "load_repeated": ("[10/s, 20/s]", "[10/s, 10/s]", "increase"),
    "load_not_a_list": ("[10/s, 20/s]", "10/s", "s.yaml:14"),
    "load_word_misspelt": ("[10/s, 20/s]", "atuo", 's.yaml:14: load.mean_rate is "atuo"', "or auto"),
    "load_points_of_a_list": ("[10/s, 20/s]", "[10/s], points: 5", "points is for an axis that is auto"),
    "load_points_too_few": ("[10/s, 20/s]", "auto, points: 2", "points is 2", "4 to 100"),
    "load_auto_of_another_axis": ("{mean_rate: [10/s, 20/s]}", "{users: auto}", "load.users does not fit"),
    "vary_empty": ("seeds: 2", "seeds: 2\nvary: {}", "s.yaml:17: vary names 0 keys", "takes one"),
    "vary_two_keys": ("seeds: 2", "seeds: 2\nvary: {kv.tokens: [1], seeds: [1]}", "s.yaml:17: vary names 2 keys"),
    "vary_seeds": ("seeds: 2", "seeds: 2\nvary: {seeds: [1, 2]}", "s.yaml:17: vary names seeds", "cannot be varied"),
    "vary_load": ("seeds: 2", "seeds: 2\nvary: {load.mean_rate: [1/s]}", "vary names load.mean_rate", "first one"),
    "vary_policies": ("seeds: 2", "seeds: 2\nvary: {policies.static: [1]}", "no knob", "policies.LABEL.KNOB"),
    "vary_no_policy": ("seeds: 2", "seeds: 2\nvary: {policies.x.y: [1]}", "no policy x", "static, continuous"),
    "vary_replaced": ("seeds: 2", "seeds: 2\nvary: {workload.arrivals.mean_rate: [1/s]}", "in whose place load"),
    "vary_replaced_share": ("seeds: 2", "seeds: 2\nvary: {kv.utilisation: [80%]}", "in whose place kv.tokens stands"),
    "kv_of_two_kinds": (MEMORY, "kv: {tokens: 16000, utilisation: 80%}", "s.yaml:3: kv.utilisation is not read beside"),
    "kv_of_two_kinds_in_a_group": (
        "seeds: 2",
        "seeds: 2\nreplicas: {groups: {a: {count: 1, kv: {tokens: 16000, utilisation: 80%}}}}",
        "s.yaml:17: replicas.groups.a.kv.utilisation is not read beside replicas.groups.a.kv.tokens",
    ),
    "vary_no_values": ("seeds: 2", "seeds: 2\nvary: {kv.tokens: []}", "s.yaml:17: vary names kv.tokens without"),
    "vary_twice": ("seeds: 2", "seeds: 2\nvary: {kv.tokens: [4000, 4000]}", "vary names kv.tokens with 4000 twice"),
    "vary_not_a_list": ("seeds: 2", "seeds: 2\nvary: {kv.tokens: 4000}", "s.yaml:17: vary.kv.tokens is 4000", "a list"),
    "vary_of_nothing": ("seeds: 2", "seeds: 2\nvary: {'': [1]}", "vary names '', which is no key"),
    "vary_of_mappings": ("seeds: 2", "seeds: 2\nvary: {kv.tokens: [{a: 1}]}", "no single value"),
    "vary_unknown_field": (
        "seeds: 2",
        "seeds: 2\nvary: {policies.static.batch_sise: [4]}",
        "s.yaml:17: vary policies.static.batch_sise, value 4: policies.static.batch_sise is not a field",
        "Did you mean batch_size?",
    ),
    "vary_value_wrong": (
        "seeds: 2",
        "seeds: 2\nvary: {kv.tokens: [4000, many]}",
        's.yaml:17: vary kv.tokens, value many: kv.tokens is "many". Write a whole number',
    ),
    "vary_value_that_does_not_go": (
        "seeds: 2",
        "seeds: 2\nvary: {max_model_len: [4000, 1000000]}",
        "s.yaml:17: vary max_model_len, value 1000000: max_model_len 1000000 is above",
    ),
    "sjf_without_predictor": (
        CONTINUOUS,
        "preemptive: {max_num_seqs: 8, max_num_batched_tokens: 512, by: recompute, waiting_order: sjf, watermark: 1%,"
        " victim: newest}",
        "s.yaml:13: ",
        "predictor",
    ),
    "predictor_of_unknown_kind": (CONTINUOUS, CONTINUOUS[:-1] + ", predictor: {kind: psychic}}", "oracle"),
    "best_of_nothing": ("batch_size: 4", "batch_size: {best_of: []}", "best_of needs a list"),
    "best_of_a_number": ("batch_size: 4", "batch_size: {best_of: 4}", "best_of needs a list"),
    "best_of_without_braces": ("batch_size: 4", "batch_size: best_of [4, 8]", "{best_of: [4, 8]}"),
    "best_of_words": ("batch_size: 4", "batch_size: {best_of: [many]}", "s.yaml:12", "batch_size"),
    "budget_below_seqs": ("max_num_batched_tokens: 512", "max_num_batched_tokens: 0", "max_num_batched_tokens"),
    "slo_mixes_forms": (
        SETS_OWN_SHARE,
        "slo: p99(ttft)<1s & tpot<50ms @ 99%",
        "Write 'p99(ttft)<1s, p99(tpot)<50ms' or 'ttft<1s & tpot<50ms @ 99%'",
    ),
    "slo_without_share": (SETS_OWN_SHARE, "slo: ttft<1s & tpot<50ms", "@ 99%"),
    "slo_without_unit": (SETS_OWN_SHARE, "slo: ttft<1 @ 99%", "slo 'ttft<1 @ 99%'"),
    "slo_unknown_metric": (SETS_OWN_SHARE, "slo: tttf<1s @ 99%", "s.yaml:15: ", "Did you mean ttft?"),
    "slo_is_prose": (SETS_OWN_SHARE, "slo: as fast as you can", "is not a bound"),
    "slo_of_single_itl": (SETS_OWN_SHARE, "slo: itl<50ms @ 99%", "p99(itl)"),
    "every_request_too_long": ("tokens: 100", "tokens: 15999", "requests rejected", "KV"),
}
SYNTAX = {
    "anchor_bomb": (
        "seeds: 2",
        "a: &a [x, x]\nb: &b [*a, *a, *a]\nc: &c [*b, *b, *b]\nd: [*c, *c, *c]",
        "alias",
    ),
    "merge_key": ("seeds: 2", "base: &b {seeds: 2}\n<<: *b", "alias"),
    "python_tag": ("seeds: 2", "seeds: !!python/object/apply:os.system [ls]", "the tag !!python"),
    "own_tag": ("seeds: 2", "seeds: !mine 2", "tag !mine"),
    "deep_nesting": ("seeds: 2", "seeds: " + "[" * 60 + "]" * 60, "nested deeper"),
    "very_deep_nesting": ("seeds: 2", "seeds: " + "[" * 600, "nested too deeply"),
    "two_documents": ("seeds: 2", "seeds: 2\n---\nseeds: 3", "not valid YAML"),
    "tab": ("seeds: 2", "\tseeds: 2", "s.yaml:16: not valid YAML"),
    "unclosed": ("seeds: 2", "seeds: [2", "not valid YAML"),
    "control_character": ("seeds: 2", "seeds: \x07", "s.yaml"),
    "indentation": ("  output_cap: 16", "     output_cap: 16", "not valid YAML"),
}
CASES = KEYS | VALUES | NAMES | SENSE | SYNTAX


@pytest.mark.parametrize(("old", "new", "expected"), [(c[0], c[1], c[2:]) for c in CASES.values()], ids=CASES)
def test_wrong_scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, expected: tuple) -> None:
    """A scenario with one thing wrong names the place and leaves no results."""
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(changed(TINY, old, new), encoding="utf-8")
    if "requests rejected" in expected:  # known only after the run, whose results are whole
        result = batchsim("run", "s.yaml", "--jobs", 1)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert all(text in result.stderr for text in expected)
        return
    refused(tmp_path, ["run", "s.yaml", "--jobs", 1], *expected)


def test_static_batch_larger_than_the_closed_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer users than the batch waits for, and no max_wait, would wait for ever: refused with both numbers."""
    monkeypatch.chdir(tmp_path)
    text = changed(changed(TINY, LOAD, ""), ARRIVALS, CLOSED)
    Path("s.yaml").write_text(changed(text, ", max_wait: 100ms", ""))
    refused(tmp_path, ["run", "s.yaml"], "s.yaml:12", "waits for 4 requests", "3 users", "max_wait")


FILES = {
    "empty": (b"", "holds no keys"),
    "comments_only": (b"# nothing\n", "holds no keys"),
    "list_at_top": (b"- model: x\n", "holds no keys"),
    "word_at_top": (b"hello\n", "holds no keys"),
    "binary": (bytes(range(256)), "cannot be read"),
    "utf16": ("model: x".encode("utf-16"), "cannot be read"),
    "nul_bytes": (b"model: \0\0\n", "s.yaml"),
    "too_large": (b"# " + b"x" * 1_000_001, "at most"),
}


@pytest.mark.parametrize(("content", "expected"), FILES.values(), ids=FILES)
def test_file_that_is_no_scenario(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, expected: str
) -> None:
    """A file that holds no scenario is refused by name."""
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_bytes(content)
    refused(tmp_path, ["run", "s.yaml"], "s.yaml", expected)


ARGUMENTS = {
    "no_such_scenario": (["run", "burst"], "Did you mean bursty?"),
    "no_such_file": (["run", "none/of.yaml"], "no such scenario"),
    "folder_as_scenario": (["run", "."], "cannot be read"),
    "file_as_folder_of_the_scenario": (["run", "s.yaml/x.yaml"], "s.yaml/x.yaml"),
    "name_too_long": (["run", "x" * 5000], "cannot be read"),
    "name_with_nul": (["run", "a\0b"], "a"),
    "set_without_value": (["run", "s.yaml", "--set", "seeds"], "--set seeds=1"),
    "set_without_key": (["run", "s.yaml", "--set", "=1"], "key.key=value"),
    "set_below_a_number": (["run", "s.yaml", "--set", "seeds.x=1"], "--set seeds.x=1", "has no keys"),
    "set_twice": (
        ["run", "s.yaml", "--set", "seeds=1", "--set", "seeds=2"],
        "--set seeds=1: --set seeds=2 replaces it. Drop one of them.",
    ),
    "set_below_what_is_set_whole": (
        ["run", "s.yaml", "--set", "kv.tokens=100", "--set", "kv={tokens: 200}"],
        "--set kv.tokens=100: --set kv={tokens: 200} replaces it",
    ),
    "set_very_deep": (["run", "s.yaml", "--set", "a." * 2000 + "a=1"], "nested deeper than 30 levels"),
    "set_unknown_key": (["run", "s.yaml", "--set", "sedes=1"], "--set sedes=1", "Did you mean seeds?"),
    "set_wrong_type": (["run", "s.yaml", "--set", "seeds=x"], "--set seeds=x", "seeds is"),
    "set_bad_yaml": (["run", "s.yaml", "--set", "policies={static: [}"], "not valid YAML"),
    "load_not_tested": (["run", "s.yaml", "--load", "7"], "--load 7", "10, 20"),
    "load_not_a_number": (["run", "s.yaml", "--load", "high"], "batchsim run: ", "--load"),
    "jobs_zero": (["run", "s.yaml", "--jobs", "0"], "--jobs"),
    "out_is_a_file": (["run", "s.yaml", "--out", "s.yaml"], "cannot be written", "--out"),
    "unknown_option": (["run", "s.yaml", "--jbos", "2"], "--jbos"),
    "missing_argument": (["run"], "Missing argument"),
    "unknown_command": (["rnu", "s.yaml"], "rnu"),
    "explain_without_results": (["explain", "."], "holds no results"),
    "explain_traces_nowhere": (["explain", ".", "--traces", "nowhere"], "no such folder to look for traces in"),
    "validate_name_a_path": (["validate", "s.yaml", "--name", "../x"], "--name ../x: is the name of files in --out"),
    "explain_of_nothing": (["explain", "nowhere"], "holds no results"),
    "inspect_nothing": (["trace", "inspect", "no.csv"], "no.csv: no such file. Give the file of a trace."),
    "inspect_folder": (["trace", "inspect", "."], "not a file"),
    "inspect_scenario": (["trace", "inspect", "s.yaml"], "no known format", "columns"),
    "inspect_unknown_format": (["trace", "inspect", "s.yaml", "--format", "csv"], "--format csv", "azure"),
    "inspect_bad_columns": (["trace", "inspect", "s.yaml", "--columns", "in,out"], "prompt=NAME,output=NAME"),
    "inspect_columns_twice": (
        ["trace", "inspect", "s.yaml", "--columns", "prompt=a,output=b,prompt=c"],
        "prompt=NAME,output=NAME",
    ),
    "inspect_columns_without_unit": (
        ["trace", "inspect", "s.yaml", "--columns", "arrival=a,prompt=b,output=c"],
        "s.yaml: trace.columns.arrival 'a' has no unit. Write time_unit: ns, us, ms, s or iso. Here: --time-unit.",
    ),
    "inspect_columns_by_set": (
        ["trace", "inspect", "my.csv", "--set", "columns.arrival=x"],
        "columns.prompt is missing. Add it.",
        "Here: --columns.",
    ),
    "run_columns_as_json": (
        ["run", "s.yaml", "--json", "--columns", "makespan"],
        "--columns makespan: is of the table, which --json replaces. Drop one of them.",
    ),
    "inspect_hash_ids_without_a_size": (
        ["trace", "inspect", "s.yaml", "--columns", "prompt=b,output=c,hash_ids=h"],
        "Here: --set hash_id_block_size=VALUE.",
    ),
    "inspect_zeros_refused": (
        ["trace", "inspect", "z.csv", "--columns", "prompt=a,output=b", "--set", "zero_lengths=error"],
        "Write zero_lengths: drop, or prefill_only where only the output is 0. Here: --set zero_lengths=VALUE.",
    ),
    "fit_a_broken_row": (
        ["trace", "fit", "z.csv", "--columns", "prompt=b,output=c"],
        "Correct it, or write on_broken: drop. Here: --set on_broken=VALUE.",
    ),
    "inspect_unknown_key": (["trace", "inspect", "z.csv", "--set", "zero_length=drop"], "Did you mean zero_lengths?"),
    "inspect_own_code": (
        ["trace", "inspect", "z.csv", "--set", "reader=os:system"],
        "--set reader=os:system: runs code. Write a scenario with it.",
    ),
    "inspect_unknown_unit": (["trace", "inspect", "s.yaml", "--time-unit", "days"], "--time-unit days"),
    "inspect_out_in_no_folder": (
        ["trace", "inspect", "my.csv", "--columns", "prompt=in,output=out", "--out", "no/p.png"],
        "no/p.png",
        "cannot be written",
    ),
    "inspect_out_is_a_folder": (
        ["trace", "inspect", "my.csv", "--columns", "prompt=in,output=out", "--out", "."],
        "is a folder",
    ),
    "init_over_a_file": (["init", "-o", "s.yaml"], "s.yaml", "--force"),
    "init_unknown_model": (["init", "-o", "n.yaml", "--model", "qwen3-8"], "Did you mean qwen3-8b?"),
    "init_unknown_gpu": (["init", "-o", "n.yaml", "--gpu", "h1000"], "Did you mean h100"),
    "init_unknown_engine": (["init", "-o", "n.yaml", "--engine", "vlm"], "--engine vlm", "Did you mean vllm?"),
    "init_of_two_lines": (["init", "-o", "n.yaml", "--from-vllm", "vllm serve m", "--tp", "2"], "without --tp"),
    "init_of_no_type": (["init", "-o", "n.yaml", "--weights", "fp9"], "init:8: deployment.weights is", "'fp8_block'"),
    "init_of_no_kv_type": (["init", "-o", "n.yaml", "--kv", "int4"], "deployment.kv"),
    "init_of_experts_without_any": (["init", "-o", "n.yaml", "--ep", "8"], "ep: 8 is not a divisor of the 1 GPUs"),
    "init_of_no_stages": (["init", "-o", "n.yaml", "--pp", "0"], "--pp"),
    "init_of_an_unknown_flag": (
        ["init", "-o", "n.yaml", "--from-vllm", "vllm serve m --prot 1"],
        "Did you mean --port?",
    ),
    "init_of_no_flag": (["init", "-o", "n.yaml", "--from-trtllm", "trtllm-serve m x"], "is the value of no flag"),
    "show_of_nothing": (["show", "nowhere.yaml"], "nowhere.yaml: no such scenario"),
    "init_in_no_folder": (["init", "-o", "no/n.yaml"], "cannot be written"),
    "inspect_a_folder": (["trace", "inspect", "."], ".: not a file. Give the file of a trace."),
    "init_missing_trace": (["init", "-o", "n.yaml", "--trace", "no.csv"], "no such file"),
    "set_of_a_loaded_rate": (
        ["run", "s.yaml", "--set", "workload.arrivals.mean_rate=9/s"],
        "--set workload.arrivals.mean_rate=9/s: load.mean_rate stands in its place",
    ),
    "set_of_loaded_users": (
        [
            "run",
            "s.yaml",
            "--set",
            f"workload.arrivals={CLOSED}",
            "--set",
            "load={users: [4]}",
            "--set",
            "workload.arrivals.users=7",
        ],
        "--set workload.arrivals.users=7: load.users stands in its place",
    ),
    "set_of_a_replaced_share": (
        ["run", "s.yaml", "--set", "kv.utilisation=80%"],
        "--set kv.utilisation=80%: kv.tokens stands in its place",
    ),
    "set_of_what_replaces": (
        ["run", "s.yaml", "--set", "kv={utilisation: 80%}", "--set", "kv.tokens=16000"],
        "kv.utilisation is not read beside kv.tokens",
    ),
    "traces_in_no_folder": (["run", "s.yaml", "--traces", "nowhere"], "nowhere: no such folder", "--traces"),
    "out_of_no_name": (["run", "s.yaml", "--out", ""], "--out has an empty value"),
    "out_of_no_name_joined": (["capacity", "s.yaml", "--out="], "--out has an empty value"),
    "output_of_no_name": (["init", "-o", ""], "-o has an empty value"),
    "set_of_nothing": (["run", "s.yaml", "--set", ""], "--set has an empty value"),
    "init_columns_without_trace": (["init", "-o", "n.yaml", "--time-unit", "ms"], "--trace"),
    "conform_unknown_policy": (["conform", "s.yaml", "--policy", "vlm"], "is no policy here"),
    "conform_no_recording": (["conform", "s.yaml", "--policy", "vllm"], "not a recording"),
    "conform_missing_file": (["conform", "no.json", "--policy", "vllm"], "cannot be read"),
    "conform_without_policy": (["conform", "s.yaml"], "not a recording"),
}


@pytest.mark.parametrize(("args", "expected"), [(c[0], c[1:]) for c in ARGUMENTS.values()], ids=ARGUMENTS)
def test_wrong_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[object], expected: tuple[str, ...]
) -> None:
    """A wrong argument, option or path is answered in one line."""
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(TINY)
    Path("my.csv").write_text("ts,in,out\n0,5,5\n")
    Path("z.csv").write_text("a,b,c\n5,0,5\n5,5,x\n")
    refused(tmp_path, args, *expected)


# name: the trace file (None: there is none), a replacement in the replay scenario, and what the line says
TRACES = {
    "missing": (None, ("path: my.csv", "path: no.csv"), "no.csv: no such file"),
    "missing_says_what_to_fetch": (
        None,
        ("path: my.csv", f"path: no.csv, fetch: a.org/no.csv, sha256: {'ab' * 32}"),
        "Fetch a.org/no.csv",
        "ab" * 32,
    ),
    "wrong_hash": ("ts,in,out\n0,5,5\n", ("path: my.csv", f"path: my.csv, sha256: {'ab' * 32}"), "SHA-256 is"),
    "hash_is_no_hash": ("ts,in,out\n0,5,5\n", ("path: my.csv", "path: my.csv, sha256: abc"), "64 hexadecimal"),
    "empty": ("", None, "my.csv: empty"),
    "header_only": ("ts,in,out\n", None, "a header and no rows"),
    "all_lengths_zero": ("ts,in,out\n0,0,5\n1,0,7\n", None, "no usable row of 2", "2 with 0 prompt tokens"),
    "zero_lengths_refused": (
        "ts,in,out\n0,5,5\n1,5,0\n",
        ("path: my.csv", "path: my.csv, zero_lengths: error"),
        "my.csv:3",
    ),
    "broken_line": ("ts,in,out\n0,5,5\n1,five,5\n", None, "my.csv:3: in 'five' is not a number of tokens"),
    "short_line": ("ts,in,out\n0,5,5\n1,5\n", None, "my.csv:3: 2 fields where the header has 3"),
    "negative_length": ("ts,in,out\n0,-5,5\n", None, "my.csv:2: in '-5' is negative"),
    "fractional_length": ("ts,in,out\n0,5.5,5\n", None, "my.csv:2"),
    "nan_time": ("ts,in,out\nnan,5,5\n", None, "my.csv:2"),
    "infinite_time": ("ts,in,out\ninf,5,5\n", None, "my.csv:2"),
    "negative_time": ("ts,in,out\n-1,5,5\n", None, "my.csv:2: ts '-1' is negative"),
    "missing_value": ("ts,in,out\n0,,5\n", None, "my.csv:2: in is missing"),
    "column_missing": ("ts,prompt,out\n0,5,5\n", None, "no column 'in'"),
    "unclosed_quote": ('ts,in,out\n0,"5,5\n', None, "my.csv"),
    "binary": ("\0\1\2", None, "zero bytes"),
    "time_unit_missing": ("ts,in,out\n0,5,5\n", (", time_unit: ms", ""), "has no unit"),
    "no_times_to_replay": (
        "ts,in,out\n0,5,5\n",
        ("{arrival: ts, prompt: in, output: out}, time_unit: ms", "{prompt: in, output: out}"),
        "no times",
    ),
    "rate_scale_without_by": (
        "ts,in,out\n0,5,5\n",
        ("path: my.csv", "path: my.csv, rate_scale: {factor: 2}"),
        "rate_scale.by is missing",
    ),
    "rows_beyond_the_end": (
        "ts,in,out\n0,5,5\n",
        ("path: my.csv", "path: my.csv, rows: [5, 9]"),
        "the file is shorter",
    ),
    "rows_and_time": (
        "ts,in,out\n0,5,5\n",
        ("path: my.csv", "path: my.csv, rows: [0, 1], time: [0s, 1s]"),
        "Slice by one",
    ),
}


def test_all_errors_of_a_file_are_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line each, in the order of the file; of keys first, and when these are right, of the policies' knobs."""
    monkeypatch.chdir(tmp_path)
    text = changed(changed(TINY, SETS_OWN_SHARE + "\n", ""), "mean_rate: 20/s", "mean_rate: 20")
    Path("s.yaml").write_text(changed(text, "seeds: 2", "seeds: two"))
    result = batchsim("run", "s.yaml")
    assert (result.exit_code, result.stdout) == (2, "")
    assert [line[: line.index(" is ")] for line in result.stderr.splitlines()] == [
        "s.yaml:1: slo", "s.yaml:5: workload.arrivals.mean_rate: 20", "s.yaml:15: seeds",
    ]  # fmt: skip
    Path("s.yaml").write_text(changed(changed(TINY, "batch_size: 4", "batch_size: 0"), "max_num_seqs: 8, ", ""))
    lines = batchsim("run", "s.yaml").stderr.splitlines()
    assert lines == [
        "s.yaml:12: policies.static: batch_size is 0. It must be from 1 to 2147483647.",
        "s.yaml:13: policies.continuous.max_num_seqs is missing. Add it.",
    ]
    Path("s.yaml").write_text(TINY + "".join(f"key{n}: 1\n" for n in range(12)))
    lines = batchsim("run", "s.yaml").stderr.splitlines()
    assert len(lines) == 11 and lines[9].startswith("s.yaml:26: key9 is not") and lines[10] == "2 more after these."


@pytest.mark.parametrize(("content", "change", "expected"), [(c[0], c[1], c[2:]) for c in TRACES.values()], ids=TRACES)
def test_wrong_trace(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: str | None,
    change: tuple[str, str] | None,
    expected: tuple[str, ...],
) -> None:
    """A trace that cannot be replayed as asked names the file, and the line where one is to blame."""
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("my.csv").write_text(content)
    Path("s.yaml").write_text(REPLAY if change is None else changed(REPLAY, *change))
    refused(tmp_path, ["run", "s.yaml", "--jobs", 1], *expected)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A results folder that may not be written to is named."""
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(TINY)
    Path("locked").mkdir(mode=0o500)
    refused(tmp_path, ["run", "s.yaml", "--out", "locked"], "locked", "--out")


DAMAGE = {
    "manifest_is_no_json": ("manifest.json", "{", "cannot be read"),
    "manifest_is_empty_json": ("manifest.json", "{}", "Run the scenario again"),
    "manifest_is_a_list": ("manifest.json", "[]", "Run the scenario again"),
    "points_gone": ("points.csv", None, "cannot be read"),
    "summary_is_empty": ("summary.csv", "", "cannot be read"),
    "summary_is_another_table": ("summary.csv", "a,b\n1,2\n", "Run the scenario again"),
}


@pytest.mark.parametrize(("name", "content", "expected"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_results(tmp_path: Path, ran: Path, name: str, content: str | None, expected: str) -> None:
    """Results that somebody damaged are named, with the advice to run again."""
    shutil.copytree(ran, tmp_path / "s")
    (folder,) = [file.parent for file in tmp_path.glob("s/*/manifest.json")]
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    refused(tmp_path, ["explain", folder], str(folder), expected)


@pytest.mark.parametrize("content", [None, b"", b"PAR1 and no more"], ids=["gone", "empty", "cut"])
def test_damaged_tables(tmp_path: Path, ran: Path, content: bytes | None) -> None:
    """A point's table that is gone or cut off is named too."""
    shutil.copytree(ran, tmp_path / "s")
    for table in tmp_path.glob("s/points/*/steps.parquet"):
        table.unlink()
        if content is not None:
            table.write_bytes(content)
    refused(tmp_path, ["explain", tmp_path / "s"], "steps cannot be read", "Run the scenario again")


EXPLAIN = {
    "policy": (["--policy", "contiguous"], "has no policy contiguous", "static, continuous"),
    "load": (["--load", "7"], "load 7 was not tested"),
    "seed": (["--seed", "9"], "seed 9"),
    "request": (["--request", "99999"], "no request 99999"),
    "negative_request": (["--request", "-1"], "no request -1"),
    "slowest": (["--slowest", "-1"], "--slowest"),
}


@pytest.mark.parametrize(("args", "expected"), [(c[0], c[1:]) for c in EXPLAIN.values()], ids=EXPLAIN)
def test_explain_of_what_was_not_run(ran: Path, args: list[str], expected: tuple[str, ...]) -> None:
    """A policy, load, seed or request that the run does not have is named, with those it has where they are few."""
    refused(ran, ["explain", ran, *args], *expected)


@pytest.mark.parametrize("command", ["capacity", "plan", "validate"])
def test_commands_that_take_one_value_refuse_a_varied_key(command: str, tmp_path: Path) -> None:
    """They would otherwise ignore it."""
    (tmp_path / "s.yaml").write_text(TINY + "vary: {kv.tokens: [4000, 8000]}\n")
    said = f"s.yaml:17: kv.tokens is varied, and batchsim {command} takes one value"
    refused(tmp_path, [command, tmp_path / "s.yaml"], said)


# ---- what an error repeats

LONG = {"a word": "x" * 3000, "words": "a b " * 750, "quotes": "it's " * 600, "a path": "a/" * 1500}
REPEATING = {
    "a key": lambda folder, text: ("run", folder / "s.yaml", "--set", f"{text}=1"),
    "a value": lambda folder, text: ("run", folder / "s.yaml", "--set", f"slo={text}"),
    "a quantity": lambda folder, text: ("run", folder / "s.yaml", "--set", f"workload.warmup={text}"),
    "a model": lambda folder, text: ("run", folder / "s.yaml", "--set", f"model={text}"),
    "a scenario": lambda folder, text: ("run", text),
    "results": lambda folder, text: ("explain", text),
    "a command": lambda folder, text: (text,),
    "an option": lambda folder, text: ("conform", folder / "s.yaml", "--order", text),
    "an argument": lambda folder, text: ("policies", text),
    "a policy": lambda folder, text: ("conform", folder / "s.yaml", "--policy", text),
    "a recording": lambda folder, text: ("conform", text),
}


@pytest.mark.parametrize("where", REPEATING)
def test_an_error_repeats_at_most_200_letters_of_what_was_written(where: str, tmp_path: Path) -> None:
    """Whatever is long, with spaces, quotes or slashes: one line that shows its beginning and its end."""
    (tmp_path / "s.yaml").write_text(TINY)
    for text in LONG.values():
        result = batchsim(*REPEATING[where](tmp_path, text))
        assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output
        repeated = [result.stderr[i : i + 201] in text for i in range(len(result.stderr) - 200)]
        assert not any(repeated) and len(result.stderr) < 1200, result.stderr


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
@pytest.mark.parametrize("old", ["seeds:", "static:", "10ms", "ttft<1s & tpot<50ms @ 99%", "fixed"])
def test_so_does_an_error_in_a_scenario(old: str, text: str, tmp_path: Path) -> None:
    """A key, a label, a quantity, an objective or a kind of 3,000 letters in the file itself."""
    quoted = "'" + text.replace("'", "''") + "'"
    (tmp_path / "s.yaml").write_text(changed(TINY, old, quoted + ":" * old.endswith(":")))
    result = batchsim("run", tmp_path / "s.yaml")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output
    assert not any(result.stderr[i : i + 201] in text for i in range(len(result.stderr) - 200)), result.stderr


class Counted(str):
    """A text that counts how often it is searched."""

    searched = 0

    def __contains__(self, piece: object) -> bool:
        Counted.searched += 1
        return super().__contains__(piece)  # type: ignore[operator]


@pytest.mark.parametrize("text", ["x" * 100_000, "a b " * 25_000, "".join(map(str, range(20_000)))])
def test_a_long_text_is_cut_in_few_searches(text: str) -> None:
    """Its length in hundreds and some: to look for every stretch at every letter takes their square."""
    Counted.searched = 0
    cut = _without(Counted(text), f"--set {text}: is wrong, and {text[::-1]}.")
    assert cut.startswith(f"--set {text[:50]}") and Counted.searched < 3 * len(text) / 50


@pytest.mark.parametrize(
    ("admission", "reason"),
    [
        ("{rate_limit: {of: tokens, per_second: 0.001, burst: 1}}", "rate_limited"),
        ("{max_outstanding: 1, shed: {x: 0}}", "shed"),
    ],
)
def test_why_a_gate_rejected_all_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, admission: str, reason: str
) -> None:
    """Its reason, which no engine wrote down with numbers."""
    monkeypatch.chdir(tmp_path)
    text = changed(TINY, "  requests: 40\n", "  requests: 40\n  classes: {x: {share: 100%}}\n")
    text += f"replicas: {{count: 2, router: round_robin, admission: {admission}}}\n"
    Path("s.yaml").write_text(text)
    result = batchsim("run", "s.yaml", "--jobs", "1", "--no-pictures")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert f"requests rejected: {reason}. Correct what the reason names" in result.stderr


@pytest.mark.parametrize("change", ['model="\\ud800"', 'policies={"a\\udfff": {kind: vllm}}', 'slo="\\udc80"'])
def test_halves_of_letters_are_one_line(tmp_path: Path, change: str) -> None:
    """As JSON may escape them, in values and keys; no file could hold them."""
    (tmp_path / "s.yaml").write_text(TINY)
    result = batchsim("run", tmp_path / "s.yaml", "--set", change)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert "holds half of a letter" in result.stderr and "Write whole ones." in result.stderr


def _refused(name: str, folder: Path) -> tuple[str, list[str]]:
    """What `run` says of a scenario that it refuses, and the modules that it has loaded by then."""
    code = (
        "import sys\nfrom batchsim.cli import app\n"
        f"try: app(['run', '{name}'])\nexcept SystemExit as end: print(end.code, *sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    status, *loaded = process.stdout.split()
    assert status == "2"
    return process.stderr, loaded


def test_a_missing_scenario_is_refused_before_its_classes_are_imported(tmp_path: Path) -> None:
    """Neither those, nor the reader of YAML."""
    stderr, loaded = _refused("nowhere.yaml", tmp_path)
    assert "nowhere.yaml: no such scenario." in stderr
    assert {"yaml", "batchsim.scenario.config"}.isdisjoint(loaded) and "batchsim.scenario.load" in loaded


def test_a_misspelt_key_is_refused_before_what_takes_seconds_is_imported(tmp_path: Path) -> None:
    """A refusal of a key loads no arrays, tables, plots, profiles, schedulers, workloads or other commands, and of the
    blocks and kinds that a scenario may have those alone that are in the file."""
    (tmp_path / "s.yaml").write_text(changed(TINY, "slo:", "slos:"))
    stderr, loaded = _refused("s.yaml", tmp_path)
    assert "slos is not a field" in stderr
    heavy = {"numpy", "pandas", "scipy", "matplotlib", "simpy", "batchsim.policies.registry", "batchsim.workload.build"}
    heavy |= {"batchsim.cost.profile", "batchsim.cli.plan", "batchsim.cost.roofline", "batchsim.drive.fleet.routing"}
    heavy |= {"batchsim.scenario.deployment_config", "batchsim.deployment.model", "batchsim.scenario.described"}
    heavy |= {"batchsim.scenario.plan_config", "batchsim.scenario.replicas_config", "batchsim.scenario.fitted_config"}
    assert heavy.isdisjoint(loaded) and "batchsim.scenario.parse" in loaded
