"""The load generator over HTTP: wrk, as many requests in flight as asked for, each answered before the next is sent.

Its cost is some microseconds a request, so that it takes little of the two cores that it shares with the servers.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.processes import BenchmarkError

#: A request that is not answered for so long fails the benchmark.
TIMEOUT_S = 60
#: One body is sent as it is, several in turn. A thread has this script to itself, and there is only one.
_SCRIPT = """
wrk.method = "POST"
local bodies = {}
for line in io.lines(BODIES) do bodies[#bodies + 1] = line end
wrk.body = bodies[1]
if #bodies > 1 then
    local requests, number = {}, 0
    function init()
        for index, body in ipairs(bodies) do requests[index] = wrk.format(nil, nil, nil, body) end
    end
    function request()
        number = number % #requests + 1
        return requests[number]
    end
end
function done(summary, latency)
    local errors = summary.errors
    local failed = errors.connect + errors.read + errors.write + errors.status + errors.timeout
    io.write(string.format("RATE %f P50 %f P99 %f FAILED %d\\n", summary.requests / summary.duration * 1e6,
        latency:percentile(50) / 1e3, latency:percentile(99) / 1e3, failed))
end
"""


@dataclass(frozen=True, slots=True)
class Answered:
    """What a load came to: requests per second, and milliseconds from sending to the whole answer."""

    rate: float
    p50_ms: float
    p99_ms: float


def closed_loop(
    url: str, bodies: Sequence[str], *, in_flight: int, seconds: int, headers: Mapping[str, str] | None = None
) -> Answered:
    """POST these JSON texts (each one line) in turn for so long. Every answer must be a success."""
    if shutil.which("wrk") is None:
        raise BenchmarkError("wrk is not installed: `make bench` installs it on Debian as root")
    with TemporaryDirectory(prefix="sheaf-bench-") as folder:
        lines, script = Path(folder, "bodies"), Path(folder, "post.lua")
        lines.write_text("".join(f"{body}\n" for body in bodies))
        sent = {"Content-Type": "application/json", **(headers or {})}
        head = [f'BODIES = "{lines}"'] + [f'wrk.headers["{name}"] = "{value}"' for name, value in sent.items()]
        script.write_text("\n".join([*head, _SCRIPT]))
        command = [
            "wrk",
            "-t1",
            f"-c{in_flight}",
            f"-d{seconds}s",
            "--timeout",
            f"{TIMEOUT_S}s",
            "-s",
            str(script),
            url,
        ]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = re.search(r"RATE (\S+) P50 (\S+) P99 (\S+) FAILED (\d+)", done.stdout)
    if found is None or int(found[4]) or not float(found[1]):
        raise BenchmarkError(f"not every request was answered with success: {done.stdout}")
    return Answered(float(found[1]), float(found[2]), float(found[3]))
