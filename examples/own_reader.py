"""A trace reader of one's own: an access log, `2024-05-01T10:00:03Z POST /v1/chat 200 in=812 out=97` a line.

    workload:
      arrivals: {kind: trace}
      trace:
        path: access.log
        reader: "own_reader:AccessLog"
        columns: {arrival: at, prompt: in, output: out, status: status}
        time_unit: iso

with this folder on PYTHONPATH and --allow-code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_LINE = re.compile(r"(?P<at>\S+) POST \S+ (?P<status>\d+) in=(?P<in>\d+) out=(?P<out>\d+)")


class AccessLog:
    def records(self, path: Path) -> Iterator[dict[str, object]]:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                if match := _LINE.match(line):  # other requests, like GET /health, are no work
                    yield {**match.groupdict()}
