"""The page to look around in: what each address answers is what the records say, and who may ask."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchsim.base.errors import ScenarioError
from batchsim.kernel.record import FINISHED
from batchsim.metrics.attribution import PARTS, UNSTATED
from batchsim.metrics.table import METRICS
from batchsim.report.decisions import decisions
from batchsim.report.page.run_decision import decision
from batchsim.report.sheet import sentence_text
from batchsim.report.text import story_text
from batchsim.report.text.story_text import story
from batchsim.scenario import load_scenario
from batchsim.study.curves.run import run_scenario
from batchsim.view import page_data as page_data_module
from batchsim.view.downsampling import downsampled_rows
from batchsim.view.lanes import KINDS
from batchsim.view.page_data import PageData
from batchsim.view.view_server import ViewServer

SCENARIO = """\
model: llama-3.1-8b
cost: {kind: linear, base: 8ms, per_token: 80us}
kv: {tokens: 1600}
workload:
  arrivals: {kind: poisson, mean_rate: 6/s}
  lengths:
    prompt: {kind: uniform, min: 50, max: 500}
    output: {kind: uniform, min: 10, max: 60}
  output_cap: 100
  requests: 40
policies:
  continuous: {max_num_seqs: 4, max_num_batched_tokens: 256}
  preemptive: {max_num_seqs: 8, max_num_batched_tokens: 256, by: recompute, victim: newest, watermark: 5%}
load: {mean_rate: [6/s, 9/s]}
slo: ttft<300ms & tpot<16ms @ 99%
seeds: 1
"""


@pytest.fixture(scope="module")
def page_data(tmp_path_factory: pytest.TempPathFactory) -> PageData:
    folder = tmp_path_factory.mktemp("view")
    path = folder / "small.yaml"
    path.write_text(SCENARIO)
    return PageData(run_scenario(load_scenario(str(path)), out=folder / "results"), [folder])


@pytest.fixture(scope="module")
def port(page_data: PageData) -> Iterator[int]:
    with ViewServer(page_data, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def ask(port: int, path: str, body: Any = None, method: str = "GET", **headers: str) -> tuple[int, Any, dict[str, str]]:
    """Status, body (parsed where it is JSON) and headers of an answer."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    link.putrequest(method, path, skip_host="Host" in headers)
    data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else b""
    headers = {"Content-Length": str(len(data))} | headers if method == "POST" else headers
    for name, value in headers.items():
        link.putheader(name.replace("_", "-"), value)
    link.endheaders(data)
    answer = link.getresponse()
    text = answer.read()
    its = {name.lower(): value for name, value in answer.getheaders()}
    link.close()
    return answer.status, json.loads(text) if "json" in its.get("content-type", "") else text.decode(), its


def post(port: int, body: Any, **headers: str) -> tuple[int, Any]:
    status, found, _ = ask(port, "/counterfactual", body, "POST", **{"Content_Type": "application/json"} | headers)
    return status, found


def test_fewer_rows_keep_the_extremes_of_every_column() -> None:
    """In every stretch, not only over all; rows stay in order and few enough, NaN is nobody's extreme."""
    draws = np.random.default_rng(3)
    one, two = draws.normal(size=20_000), draws.normal(size=20_000)
    one[777], two[12_345], one[5] = 50.0, -50.0, np.nan
    kept = downsampled_rows([one, two], 1000)
    assert len(kept) <= 1000 and (np.diff(kept) > 0).all() and {0, 777, 12_345, 19_999} <= set(kept.tolist())
    for edge in range(0, 20_000, 200):  # stretches are of 80 rows, so each of these holds a whole one
        assert ((kept >= edge) & (kept < edge + 200)).sum() >= 4
    assert downsampled_rows([one], 20_000).tolist() == list(range(20_000))
    with pytest.raises(ValueError, match="need 10 rows"):
        downsampled_rows([one, one, one, one], 9)


def test_curves_name_the_point_of_every_value(page_data: PageData, port: int) -> None:
    """A value that is clicked opens the policy and load that it is of."""
    status, found, _ = ask(port, "/curves")
    rows = page_data.results.points
    assert status == 200 and len(found["points"]) == len(rows) == 4
    for chart in found["charts"]:
        for line in chart["series"]:
            for load, number in zip(line["x"], line["points"], strict=True):
                assert rows["load"][number] == load and line["label"] in rows["label"][number]
    assert found["decision"][0].startswith("continuous and preemptive sustain the most")


def test_the_page_begins_with_the_best_policy_at_its_best_load(tmp_path: Path) -> None:
    """The highest load at which the lower end of some policy's interval meets the objective, though another meets it on
    average at a higher one; its sentence is that of the report."""
    path = tmp_path / "easy.yaml"
    path.write_text(SCENARIO.replace("ttft<300ms & tpot<16ms @ 99%", "ttft<2s @ 80%").replace("seeds: 1", "seeds: 3"))
    results = run_scenario(load_scenario(str(path), overrides=["load={mean_rate: [3/s, 6/s, 9/s]}"]), out=tmp_path)
    page_data = PageData(results)
    found = page_data.curves()
    judged = {each.name: each for each in decisions(results)}
    most = max(each.sure for each in judged.values() if each.sure is not None)
    policy, load, seed = page_data.points()[found["first"]]
    assert load == most == judged[policy].sure and seed == 0
    margins = {name: load.margin for name, each in judged.items() for load in each.loads if load.load == most}
    assert margins[policy] == max(margins[name] for name, each in judged.items() if each.sure == most)
    answer, how_sure = ([sentence_text(each) for each in part] for part in decision(results))
    assert (found["decision"], found["sure"], found["seeds"]) == (answer, how_sure, "3 seeds")
    assert any(line["low"] for chart in found["charts"] for line in chart["series"])


def test_every_word_of_a_request_s_life_is_explained(page_data: PageData) -> None:
    """Parts, what held the queue, and kinds of spans."""
    words = page_data.curves()["words"]
    assert {*PARTS, *KINDS, *story_text._REASONS, UNSTATED} <= set(words) and all(words.values())


def test_a_point_says_its_metrics(page_data: PageData, port: int) -> None:
    """Beside how much there is of it."""
    _, found, _ = ask(port, "/point?point=1")
    assert found["requests"] == 40 and found["replicas"] == [0]
    metrics = {name: (value, doc) for name, value, doc in found["metrics"]}
    assert metrics["ttft p99"][0].endswith("s") and metrics["in SLO"][1] == METRICS["in_slo"].doc
    assert found["measured"] == page_data.results.points["cohort"][1]


def test_a_timeline_is_the_steps_of_its_window(page_data: PageData, port: int) -> None:
    """All of the run, and those that overlap a window; KV in use is what is not free."""
    steps = page_data.results.steps(*page_data.points()[0])
    _, whole, _ = ask(port, "/timeline?point=0")
    ran = [k for k, step_s in enumerate(whole["step_s"]) if step_s > 0]
    assert whole["exact"] and whole["of"] == whole["shown"] == len(steps) == len(ran)
    assert [whole["waiting"][k] for k in ran] == steps["num_waiting"].tolist()
    blocks = page_data.results.manifest["num_blocks"]
    kv_share = [whole["kv_share"][k] for k in ran]
    assert kv_share == pytest.approx((1 - steps["free_blocks"] / blocks).tolist())
    start_ns, step_ns = (int(steps[name].iloc[5]) for name in ("start_ns", "duration_ns"))
    start, end = start_ns / 1e9, (start_ns + step_ns) / 1e9
    for window in (f"from={start}&to={end}", f"from={start + 1e-6}&to={end - 1e-6}"):  # neighbours only touch it
        _, one, _ = ask(port, f"/timeline?point=0&{window}")
        assert one["of"] == 1 and one["start_s"] == [start] and one["step_s"] == [step_ns / 1e9]
        assert one["until_s"] == end


def test_a_long_timeline_is_thinned_and_says_so(page_data: PageData, monkeypatch: pytest.MonkeyPatch) -> None:
    """To true steps, the highest queue among them."""
    monkeypatch.setattr(page_data_module, "MOST_ROWS", 60)
    found, steps = page_data.timeline(0, 0, None), page_data.results.steps(*page_data.points()[0])
    assert not found["exact"] and found["shown"] <= len(found["start_s"]) <= 60 < found["of"] == len(steps)
    assert max(found["waiting"]) == steps["num_waiting"].max()
    assert max(found["step_s"]) == pytest.approx(steps["duration_ns"].to_numpy().max() / 1e9)


def test_requests_and_the_life_of_one(page_data: PageData, port: int) -> None:
    """The slowest come first; a life is that of `explain`."""
    _, found, _ = ask(port, "/requests?point=2&by=e2e")
    rows = page_data.results.requests(*page_data.points()[2])
    e2e = (rows["delivered_ns"] - rows["sent_ns"]) / 1e9
    assert (
        found["slowest"][0]["value_s"] == e2e.max()
        and found["slowest"][0]["request_id"] == rows["request_id"][e2e.idxmax()]
    )
    assert found["of"] == 40 and found["others"] == 0 and sorted(found["value_s"]) == sorted(e2e)
    number = found["slowest"][0]["request_id"]
    _, life, _ = ask(port, f"/request?point=2&id={number}")
    assert life == json.loads(json.dumps(story(page_data.results, *page_data.points()[2], number)))
    half = float(rows["sent_ns"].median()) / 1e9
    _, some, _ = ask(port, f"/requests?point=2&by=e2e&from=0&to={half}")
    assert some["of"] == (rows["sent_ns"] <= half * 1e9).sum()


def test_two_points_are_compared_request_by_request(page_data: PageData, port: int) -> None:
    """Each pair is the same id; counts and the largest change are of all pairs."""
    _, found, _ = ask(port, "/compare?point=0&other=2&by=ttft")
    sides = []
    for number in (0, 2):
        rows = page_data.records(number).requests
        assert (rows["outcome"] == FINISHED).all()
        ttft = (rows["first_delivery_ns"] - rows["sent_ns"]) / 1e9
        sides.append(dict(zip(rows["request_id"].tolist(), ttft.tolist(), strict=True)))
    for number, here, there in zip(found["id"], found["here_s"], found["there_s"], strict=True):
        assert (here, there) == (sides[0][number], sides[1][number])
    change = {number: sides[1][number] - sides[0][number] for number in sides[0]}
    assert found["of"] == 40 and found["unlike"] == 0
    assert found["slower"] == sum(x > 0 for x in change.values()) and found["faster"] == sum(
        x < 0 for x in change.values()
    )
    assert abs(found["largest"][0][2] - found["largest"][0][1]) == max(map(abs, change.values()))


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/../../etc/passwd", 404, "no such address"),
        ("/%2e%2e/manifest.json", 404, "no such address"),
        ("/view.js/../secret", 404, "no such address"),
        ("/view.js?x=1", 404, "no such address"),
        ("//etc/passwd", 404, "no such address"),
        ("/point", 400, "point: 'None' is no whole number"),
        ("/point?point=4", 400, "there are 4"),
        ("/point?point=-1", 400, "there are 4"),
        ("/point?point=1e400", 400, "no whole number"),
        ("/point?point=" + "9" * 30, 400, "64 bits"),
        ("/point?point=1&point=2", 400, "twice"),
        ("/point?point=1&file=x", 400, "file: is not asked for"),
        ("/timeline?point=0&from=2&to=1", 400, "ends no later"),
        ("/timeline?point=0&from=nan&to=1", 400, "no number"),
        ("/timeline?point=0&replica=7", 400, "no step ran there"),
        ("/requests?point=0&by=__class__", 400, "is not known"),
        ("/request?point=0&id=4000", 400, "no request 4000"),
        ("/counterfactual?point=0", 404, "no such address"),
    ],
)
def test_what_is_not_offered_is_refused_in_one_line(port: int, path: str, status: int, text: str) -> None:
    """No path of the machine can be named, no parameter is passed over."""
    got, found, _ = ask(port, path)
    assert got == status and text in found["error"] and "\n" not in found["error"]


def test_other_hosts_and_origins_are_refused(port: int) -> None:
    """A foreign name that resolves to this machine, and a page of another site."""
    own = f"127.0.0.1:{port}"
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", ""):
        assert ask(port, "/curves", Host=host)[0] == 403
    assert ask(port, "/", Host=f"localhost:{port}")[0] == ask(port, "/", Host=own)[0] == 200
    body = {"point": 0, "factors": {"cost_factor": 1.5}}
    assert post(port, body, Origin="http://evil.example")[0] == post(port, body, Origin="null")[0] == 403
    assert post(port, body, Content_Type="text/plain")[0] == 415
    assert ask(port, "/curves", {}, "PUT")[0] == ask(port, "/curves", {}, "DELETE")[0] == 501
    assert "access-control-allow-origin" not in ask(port, "/curves")[2]


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"{", 400, "no JSON"),
        (b"\xff", 400, "no JSON"),
        (b"[" * 4000, 400, "no JSON"),
        ([], 400, "no JSON object"),
        ({"point": 0, "factors": {"seeds": 2}}, 400, "no knob of continuous"),
        ({"point": 0, "factors": {"load": 1e6}}, 400, "not from 0.1 to 10"),
        ({"point": 0, "factors": {"load": [2]}}, 400, "no number"),
        ({"point": 0, "factors": {"a\nb": 2}}, 400, "no object of numbers"),
        ({"point": 0, "factors": [2]}, 400, "no object of numbers"),
        ({"point": 0, "factors": {}}, 400, "Move a slider"),
        ({"point": 0.5, "factors": {"load": 2}}, 400, "no whole number"),
        (b'{"point": Infinity, "factors": {"load": 2}}', 400, "'inf' is no whole number"),
        (b'{"point": 1e999, "factors": {"load": 2}}', 400, "'inf' is no whole number"),
        (b'{"point": NaN, "factors": {"load": 2}}', 400, "'nan' is no whole number"),
        (b'{"point": 0, "factors": {"load": Infinity}}', 400, "'inf' is no number"),
        (b'{"point": 0, "point": 1, "factors": {"load": 2}}', 400, "no JSON"),
        ({"point": 0, "factors": {"load": 2}, "x": 1}, 400, "x: is not asked for"),
        (b" " * 5000, 413, "4096"),
    ],
)
def test_a_simulation_that_cannot_be_asked_for(port: int, body: Any, status: int, text: str) -> None:
    """Is refused in one line."""
    got, found = post(port, body)
    assert got == status and text in found["error"] and "\n" not in found["error"]


def test_one_simulation_at_a_time(page_data: PageData) -> None:
    """A second is told so, and the first is not disturbed."""
    with page_data._simulating, pytest.raises(ScenarioError, match="runs already"):
        page_data.changed(0, {"cost_factor": 2.0})


def test_only_points_of_one_seed_are_compared(page_data: PageData, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other seeds draw other requests under the same ids."""
    points = page_data.points()
    monkeypatch.setattr(page_data, "points", lambda: [points[0], points[1]._replace(seed=1)])
    with pytest.raises(ScenarioError, match="seeds 0 and 1 draw other requests"):
        page_data.compare(0, 1, "ttft")


def test_an_address_that_cannot_be_read_is_one_line(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    """An IPv6 address without its end, which a library on the other side would not send."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as link:
        link.sendall(f"GET http://[::1/ HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        with link.makefile("rb") as answer:
            assert b'{"error":"the address cannot be read. Open /."}' in answer.read()
    assert capfd.readouterr().err == ""


def test_clients_that_go_leave_no_traceback(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Some of those that reset their connection at once are gone before the answer; the server goes on."""
    question = f"GET /curves HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
    for _ in range(8):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as link:
            link.sendall(question)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
    assert ask(port, "/")[0] == 200 and capfd.readouterr().err == ""


def test_a_taken_port_is_said(page_data: PageData, port: int) -> None:
    """With what to do."""
    with pytest.raises(ScenarioError, match=rf"^--port {port}: cannot be listened at: .* Give another"):
        ViewServer(page_data, port)


def test_the_page_loads_nothing_from_elsewhere(port: int) -> None:
    """Its policy forbids it, and all that it names is here."""
    status, text, headers = ask(port, "/")
    assert status == 200 and "default-src 'none'" in headers["content-security-policy"] and "http" not in text
    for name in ("view.css", "uPlot.js", "charts.js", "view.js"):
        assert f'"/{name}"' in text and ask(port, f"/{name}")[0] == 200


def test_a_folder_without_results_is_one_line(tmp_path: Path) -> None:
    """The command's error is that of all commands that read results."""
    from typer.testing import CliRunner

    from batchsim.cli import app

    found = CliRunner().invoke(app, ["view", str(tmp_path)])
    assert found.exit_code == 2 and "holds no results" in found.output and found.output.count("\n") == 1
