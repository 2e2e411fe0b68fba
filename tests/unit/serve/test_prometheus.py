"""Prometheus over /metrics: the shipped files name what is there, and its quantiles are those of the requests."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import re
import shutil
import socket
import subprocess
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from tests.support.paths import ROOT

pytest.importorskip("h11", reason="batchsim serve needs h11")

from batchsim.serve.metrics import Histogram, Tally
from batchsim.serve.run_server import event_loop
from batchsim.serve.server import Server
from tests.support.serving.served import setup_of, simulation_of
from tests.unit.serve.test_metrics import ran
from tests.unit.serve.test_server import COMPLETIONS, Client

EXAMPLES = ROOT / "examples"
CONTINUOUS = "continuous: {max_num_seqs: 8, max_num_batched_tokens: 512}"
NUM_CLIENTS, NUM_EACH = 24, 200  # about a minute
_METRIC = re.compile(r"\b(?:vllm|batchsim):[a-z0-9_]+")


def test_the_board_asks_for_metrics_that_are_there() -> None:
    """Each metric that a panel of the Grafana board names is in /metrics, and each panel names one."""
    there = {name for name, _ in ran()[0]}
    panels = json.loads((EXAMPLES / "grafana.json").read_text())["panels"]
    asked = [_METRIC.findall(target["expr"]) for panel in panels for target in panel["targets"]]
    assert len(asked) > 10 and all(asked)
    assert {name for names in asked for name in names} <= there


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def prometheus(target: int, folder: Path) -> Iterator[int]:
    """The port of a Prometheus that scrapes `target` as the shipped file says."""
    found = shutil.which("prometheus")
    if found is None:
        pytest.skip("needs prometheus: apt-get install prometheus")
    config, port = folder / "prometheus.yml", _free_port()
    config.write_text((EXAMPLES / "prometheus.yml").read_text().replace(":8000", f":{target}"))
    process = subprocess.Popen(
        [
            *(found, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"),
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield port
    finally:
        process.terminate()
        process.wait(30)


def _asked(port: int, query: str) -> float | None:
    """The one value of a query, None where there is none yet."""
    with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/api/v1/query?{urlencode({'query': query})}") as answer:
        for one in json.loads(answer.read())["data"]["result"]:
            return float(one["value"][1])
    return None


async def _used(client: Client) -> None:
    """Closed loops of requests whose lengths differ."""

    async def one(number: int) -> None:
        for turn in range(NUM_EACH):
            tokens = 2 + (number * 7 + turn * 5) % 20
            await client.json(COMPLETIONS, {"prompt": [1] * 50, "max_tokens": tokens, "ignore_eos": True})

    await asyncio.gather(*(one(number) for number in range(NUM_CLIENTS)))


async def _scraped(folder: Path) -> tuple[dict[str, float], list[dict[str, str]]]:
    """P99 as Prometheus has them once it has seen all requests, and the server's own table of these."""
    server = Server(simulation_of(setup_of(CONTINUOUS)))
    client = Client(server, await server.start("127.0.0.1", 0))
    found: dict[str, float] = {}
    try:
        with prometheus(client.port, folder) as port:
            await _used(client)
            ask = asyncio.to_thread
            while await ask(_asked, port, "vllm:e2e_request_latency_seconds_count") != NUM_CLIENTS * NUM_EACH:
                await asyncio.sleep(0.2)
            for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
                query = f"histogram_quantile(0.99, sum by (le) (vllm:{name}_seconds_bucket))"
                found[name] = await ask(_asked, port, query) or 0.0
            scrapes = await ask(_asked, port, "count_over_time(up[10m])")
            found["scrapes"] = scrapes or 0.0
            text = (await client.call("GET", "/batchsim/results"))[2].decode()
    finally:
        server.close()
    return found, list(csv.DictReader(io.StringIO(text)))


def _p99(values: list[float]) -> float:
    return sorted(values)[-(-99 * len(values) // 100) - 1]


def _bucket(histogram: Histogram, value_s: float) -> tuple[float, float]:
    at = bisect_left(histogram.bounds, value_s)
    return ([0.0, *histogram.bounds])[at], histogram.bounds[at]


@pytest.mark.slow
@pytest.mark.judged
def test_the_quantiles_of_prometheus_are_those_of_the_requests(tmp_path: Path) -> None:
    """After a minute of scraping, P99 of TTFT, ITL and E2E lie in the bucket that holds that of the records."""
    if shutil.which("prometheus") is None:
        pytest.skip("needs prometheus: apt-get install prometheus")
    with asyncio.Runner(loop_factory=event_loop) as runner:
        found, rows = runner.run(asyncio.wait_for(_scraped(tmp_path), 300))
    done: list[dict[str, Any]] = [row for row in rows if row["status"] == "ok"]
    assert len(done) == NUM_CLIENTS * NUM_EACH and found["scrapes"] > 20
    ttft_s = [int(row["ttft_ns"]) / 1e9 for row in done]
    e2e_s = [int(row["e2e_ns"]) / 1e9 for row in done]
    gaps_s = [  # steps of 10 ms, so that a request's mean gap is each of its gaps
        (int(row["e2e_ns"]) - int(row["ttft_ns"])) / 1e9 / (int(row["output_tokens"]) - 1) for row in done
    ]
    tally = Tally("vllm", 4096)
    for name, histogram, values in (
        ("time_to_first_token", tally.ttft, ttft_s),
        ("inter_token_latency", tally.itl, gaps_s),
        ("e2e_request_latency", tally.e2e, e2e_s),
    ):
        low, high = _bucket(histogram, round(_p99(values), 9))
        print(f"{name}: P99 {_p99(values):.4f} s, by Prometheus {found[name]:.4f} s, bucket {low:g} to {high:g} s")
        assert low <= found[name] <= high, name
