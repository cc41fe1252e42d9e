"""`sheaf bulk list|show|pause|resume|cancel` and the runs that they are about, each a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import fsspec
import pytest
import redis
from fsspec.implementations.memory import MemoryFileSystem

from broker.bulk_runs import KEEP_S, SILENT_AFTER_S
from bulk.client import open_broker
from bulk.locations import Location, exists
from bulk.run import Progress, Task, prepared
from configs import load_settings
from tests.bulk.files import out
from tests.bulk.files import write as put
from tests.bulk.running import Bulk, running
from tests.conftest import wait_until
from tests.workers.conftest import held

MODELS: dict[str, object] = {
    "slow": {"handler": "tests.workers.handlers:Sleeper", "max_batch_size": 16, "max_wait_ms": 0},
}
ROWS = 3000
ARGUMENTS = ("in.jsonl", "out.jsonl", "--model", "slow", "--column", "s")
#: For runs that are to be steered midway: so few rows are served while a run stands still.
STEERED = ("--window", "256")
View = dict[str, Any]
Begin = Callable[..., tuple[subprocess.Popen[bytes], str]]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bulk]:
    folder = tmp_path_factory.mktemp("control")
    with running(folder, MODELS) as made:
        write(folder, [{"s": 0.0}])
        assert made.bulk(*ARGUMENTS, folder=folder).returncode == 0
        yield made


@pytest.fixture
def begin(service: Bulk) -> Iterator[Begin]:
    """Begins runs, and tells their ids; what is left of them is killed afterwards."""
    begun: list[subprocess.Popen[bytes]] = []

    def begin(folder: Path, *more: str) -> tuple[subprocess.Popen[bytes], str]:
        log = folder / "bulk.log"
        earlier = len(ids(log))
        process = service.begin(*ARGUMENTS, *more, folder=folder)
        begun.append(process)
        wait_until(lambda: len(ids(log)) > earlier, description="the run tells its id")
        return process, ids(log)[-1]

    yield begin
    for process in begun:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()


def ids(log: Path) -> list[str]:
    return re.findall(r"sheaf: run (bulk_[0-9a-f]{12});", log.read_text()) if log.exists() else []


def write(folder: Path, rows: Iterable[object]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_slow(folder: Path, *, seconds: float = 0.05) -> None:
    """Rows of which sixteen take so many seconds."""
    write(folder, [{"id": number, "s": seconds} for number in range(ROWS)])


def output(folder: Path) -> list[int]:
    return [json.loads(line)["id"] for line in (folder / "out.jsonl").read_text().splitlines()]


def rows_in_checkpoint(folder: Path) -> int:
    return int(json.loads((folder / "out.jsonl.checkpoint").read_text())["rows_done"])


def show(service: Bulk, folder: Path, run_id: str) -> View:
    done = service.bulk("show", run_id, "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    return cast("View", json.loads(done.stdout))


def listed(service: Bulk, folder: Path) -> dict[str, View]:
    done = service.bulk("list", "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    return {view["id"]: view for view in json.loads(done.stdout)}


def told(service: Bulk, folder: Path, *arguments: str) -> None:
    """A command that has to succeed."""
    done = service.bulk(*arguments, folder=folder)
    assert done.returncode == 0, done.stderr


def under_way(service: Bulk) -> int:
    """Messages of the model, wherever they are."""
    with redis.Redis.from_url(service.broker.url) as client:
        lists = [*client.keys("infer.slow*"), *client.keys("sheaf:owned:infer.slow:*")]
        lists += client.keys("sheaf:returned:infer.slow:*")
        return sum(cast("int", client.llen(key)) for key in lists) + held(service.broker.url, "infer.slow")


def has_begun(service: Bulk, run_id: str) -> None:
    """Wait until rows are done: without the command, which would take as long as many rows."""
    with redis.Redis.from_url(service.broker.url) as client:

        def rows() -> int:
            return int(json.loads(cast("bytes", client.hget(f"sheaf:bulk-run:{run_id}", "record")))["succeeded"])

        wait_until(rows, description="rows are done")


def want(service: Bulk, folder: Path, run_id: str, verb: str) -> subprocess.Popen[bytes]:
    """Begin a command that steers; returns once the broker knows what is wanted."""
    command = service.begin(verb, run_id, folder=folder)
    with redis.Redis.from_url(service.broker.url) as client:
        name = f"sheaf:bulk-run:{run_id}"
        wait_until(lambda: client.hget(name, "wanted") == verb.encode(), description="it is wanted of the run")
        # However long the command took to start, the run was heard of just now.
        client.expire(name, KEEP_S)
    return command


def steer(service: Bulk, folder: Path, process: subprocess.Popen[bytes], run_id: str, verb: str) -> None:
    """Have a `STEERED` run do something before it ends: it stands still while the command starts."""
    process.send_signal(signal.SIGSTOP)
    command = want(service, folder, run_id, verb)
    process.send_signal(signal.SIGCONT)
    assert command.wait(30) == 0, (folder / "bulk.log").read_text()


def test_a_paused_run_leaves_the_queue_to_others_and_goes_on_where_it_was(
    service: Bulk, tmp_path: Path, begin: Begin
) -> None:
    write_slow(tmp_path)
    process, run_id = begin(tmp_path, *STEERED)
    has_begun(service, run_id)
    steer(service, tmp_path, process, run_id, "pause")
    paused = show(service, tmp_path, run_id)
    assert (paused["state"], paused["rows_per_second"]) == ("paused", 0.0)
    assert 0 < paused["rows"] < ROWS
    assert rows_in_checkpoint(tmp_path) == paused["rows"]
    wait_until(lambda: not under_way(service), description="nothing of it is in the queue or in a worker")

    wait_until(
        lambda: show(service, tmp_path, run_id)["updated_at"] > paused["updated_at"], description="it reports again"
    )
    still = show(service, tmp_path, run_id)
    assert (still["state"], still["rows"], under_way(service)) == ("paused", paused["rows"], 0)
    told(service, tmp_path, "resume", run_id)
    assert process.wait(60) == 0, (tmp_path / "bulk.log").read_text()
    assert output(tmp_path) == list(range(ROWS))
    said = (tmp_path / "bulk.log").read_text()
    assert said.index(f"paused; `sheaf bulk resume {run_id}` goes on") < said.index("sheaf: goes on")
    ended = show(service, tmp_path, run_id)
    assert (ended["state"], ended["succeeded"], ended["failed"], ended["ratio"]) == ("succeeded", ROWS, 0, 1.0)
    assert not (tmp_path / "out.jsonl.checkpoint").exists()


def test_a_pause_takes_back_what_would_take_long_and_a_paused_run_can_be_cancelled(
    service: Bulk, tmp_path: Path, begin: Begin
) -> None:
    write_slow(tmp_path, seconds=1.0)
    process, run_id = begin(tmp_path)
    wait_until(lambda: held(service.broker.url, "infer.slow"), description="rows are under way")
    told(service, tmp_path, "pause", run_id)
    wait_until(lambda: not under_way(service), description="nothing of it is in the queue or in a worker")
    told(service, tmp_path, "cancel", run_id)
    assert process.wait(20) == 4
    assert show(service, tmp_path, run_id)["state"] == "cancelled"


def test_a_cancelled_run_keeps_what_it_has_done_for_resume(service: Bulk, tmp_path: Path, begin: Begin) -> None:
    write_slow(tmp_path)
    process, run_id = begin(tmp_path, *STEERED)
    has_begun(service, run_id)
    steer(service, tmp_path, process, run_id, "cancel")
    assert process.wait(20) == 4
    assert "cancelled; --resume goes on" in (tmp_path / "bulk.log").read_text()
    assert not (tmp_path / "out.jsonl").exists()
    wait_until(lambda: not under_way(service), description="nothing of it is in the queue or in a worker")
    done = service.bulk(*ARGUMENTS, *STEERED, "--resume", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["resumed_from"] > 0
    assert output(tmp_path) == list(range(ROWS))
    runs = listed(service, tmp_path)
    assert [runs[name]["state"] for name in (run_id, summary["run"])] == ["cancelled", "succeeded"]
    assert run_id != summary["run"]


def test_a_run_that_was_killed_has_stopped_and_goes_on_as_another(service: Bulk, tmp_path: Path, begin: Begin) -> None:
    write_slow(tmp_path)
    process, run_id = begin(tmp_path)
    has_begun(service, run_id)
    process.kill()
    process.wait()
    with redis.Redis.from_url(service.broker.url) as client:
        # As it is when its last report was so long ago.
        client.pexpire(f"sheaf:bulk-run:{run_id}", int((KEEP_S - SILENT_AFTER_S - 1) * 1000))
    shown = service.bulk("show", run_id, folder=tmp_path).stdout
    assert "state: stopped" in shown
    assert "error: its process is gone" in shown
    assert "the same command with --resume goes on" in shown
    refused = service.bulk("resume", run_id, folder=tmp_path)
    assert refused.returncode == 1
    assert "it is stopped (its process is gone): the same command with --resume goes on" in refused.stderr
    again, other_id = begin(tmp_path, "--resume")
    assert again.wait(60) == 0
    assert output(tmp_path) == list(range(ROWS))
    runs = listed(service, tmp_path)
    assert [runs[name]["state"] for name in (run_id, other_id)] == ["stopped", "succeeded"]


def test_a_run_that_a_signal_stops_says_so(service: Bulk, tmp_path: Path, begin: Begin) -> None:
    write_slow(tmp_path)
    process, run_id = begin(tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    stopped = show(service, tmp_path, run_id)
    assert (stopped["state"], stopped["error"]) == ("stopped", "a signal stopped it")


def test_a_paused_run_outlives_its_broker(service: Bulk, tmp_path: Path, begin: Begin) -> None:
    write_slow(tmp_path)
    process, run_id = begin(tmp_path, *STEERED)
    has_begun(service, run_id)
    steer(service, tmp_path, process, run_id, "pause")
    before = show(service, tmp_path, run_id)
    service.broker.kill()
    away = service.bulk("list", folder=tmp_path)
    assert away.returncode == 1
    service.broker.start()
    wait_until(
        lambda: show(service, tmp_path, run_id)["updated_at"] > before["updated_at"],
        description="it reports to the broker that is back",
    )
    after = show(service, tmp_path, run_id)
    assert (after["state"], after["rows"]) == ("paused", before["rows"])
    told(service, tmp_path, "resume", run_id)
    assert process.wait(60) == 0, (tmp_path / "bulk.log").read_text()
    assert output(tmp_path) == list(range(ROWS))


def test_two_runs_are_told_apart(service: Bulk, tmp_path: Path, begin: Begin) -> None:
    first, second = tmp_path / "first", tmp_path / "[second]"
    for folder in (first, second):
        write_slow(folder)
    (paused, paused_id), (running_on, other_id) = begin(first, *STEERED), begin(second)
    steer(service, first, paused, paused_id, "pause")
    assert running_on.wait(60) == 0
    runs = listed(service, tmp_path)
    assert runs[paused_id]["state"] == "paused"
    assert runs[other_id]["state"] == "succeeded"
    assert [runs[name]["input"] for name in (paused_id, other_id)] == [f"{f}/in.jsonl" for f in (first, second)]
    assert [runs[paused_id]["pid"], runs[other_id]["pid"]] == [paused.pid, running_on.pid]
    table = service.bulk("list", folder=tmp_path).stdout.splitlines()
    assert table[0].split() == [
        "id",
        "state",
        "model",
        "rows",
        "failed",
        "rows/s",
        "done",
        "input",
        "->",
        "output",
        "age",
    ]
    [line] = [line for line in table if line.startswith(other_id)]
    assert line.split()[1:5] == ["succeeded", "slow", f"{ROWS:,}", "0"]
    assert f"{second}/in.jsonl -> {second}/out.jsonl" in line
    told(service, tmp_path, "cancel", paused_id)
    assert paused.wait(20) == 4


def test_a_run_that_does_not_answer_is_told_of_and_does_it_later(service: Bulk, tmp_path: Path, begin: Begin) -> None:
    write_slow(tmp_path)
    process, run_id = begin(tmp_path)
    process.send_signal(signal.SIGSTOP)
    silent = want(service, tmp_path, run_id, "pause")
    assert silent.wait(30) == 1
    assert f"{run_id} has not answered for 10 s" in (tmp_path / "bulk.log").read_text()
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: show(service, tmp_path, run_id)["state"] == "paused", description="it has heard of it")
    told(service, tmp_path, "cancel", run_id)


def test_what_cannot_be_steered_is_told_of_each(service: Bulk, tmp_path: Path, begin: Begin) -> None:
    write_slow(tmp_path, seconds=1.0)
    process, run_id = begin(tmp_path)
    [ended, *_] = [name for name, view in listed(service, tmp_path).items() if view["state"] == "succeeded"]
    done = service.bulk("cancel", "bulk_none", ended, run_id, folder=tmp_path)
    assert done.returncode == 1
    assert "there is no bulk run bulk_none: see `sheaf bulk list`" in done.stderr
    assert f"{ended} has ended, it is succeeded" in done.stderr
    assert done.stdout == f"{run_id}: cancelled\n"
    assert process.wait(20) == 4
    unknown = service.bulk("show", "bulk_none", folder=tmp_path)
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "there is no bulk run bulk_none" in unknown.stderr


class _Broken(BaseHTTPRequestHandler):
    """Has a file, and does not give it."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "1000")
        self.send_header("accept-ranges", "bytes")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_error(500)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


def test_what_fails_before_a_row_is_run_is_no_run(service: Bulk, tmp_path: Path, s3: str) -> None:
    write(tmp_path, [{"s": 0.0}])
    (tmp_path / "in.csv").write_text("s,output\n0,x\n")
    (tmp_path / "there.jsonl").touch()
    before = listed(service, tmp_path)
    for arguments in (
        ("none.jsonl", "out.jsonl"),
        ("in.jsonl", "there.jsonl"),
        ("in.jsonl", "none/out.jsonl"),
        ("in.csv", "out.jsonl"),
        ("in.jsonl", "in.jsonl"),
        ("in.jsonl", "out.jsonl", "--errors", "none/errors.jsonl"),
        ("in.jsonl", f"{s3.replace('rows', 'no-such-bucket')}/out.jsonl"),
        ("in.jsonl", "out.jsonl", "--errors", f"{s3.replace('rows', 'no-such-bucket')}/e.jsonl"),
    ):
        refused = service.bulk(*arguments, *ARGUMENTS[2:], folder=tmp_path)
        assert refused.returncode in (1, 2)
        assert "bulk_" not in refused.stderr
        assert "no-such-bucket" in refused.stderr or "no-such-bucket" not in " ".join(arguments)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv", "in.jsonl", "there.jsonl"]
    assert listed(service, tmp_path) == before


def test_a_run_that_fails_says_why_without_credentials(service: Bulk, tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Broken) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://me:secret@127.0.0.1:{server.server_address[1]}/in.jsonl?signature=secret"
        failed = service.bulk(place, *ARGUMENTS[1:], folder=tmp_path)
        server.shutdown()
    assert failed.returncode == 1
    [view] = [view for view in listed(service, tmp_path).values() if view["output"] == f"{tmp_path}/out.jsonl"]
    assert view["state"] == "failed"
    assert "cannot read http://127.0.0.1" in view["error"]
    assert view["input"].endswith("/in.jsonl?…")
    assert "secret" not in json.dumps(view)


@pytest.mark.parametrize("name", ["in.jsonl", "in.csv.gz", "in.jsonl.zst", "in.parquet"])
async def test_progress_is_how_much_was_written(service: Bulk, tmp_path: Path, name: str) -> None:
    put(tmp_path / name, out([{"s": 0, "id": number} for number in range(ROWS)]))
    found: list[Progress] = []
    source, place = Location.parse(tmp_path / name), Location.parse(tmp_path / "out.jsonl")
    # Text of CSV is no number, which the rows then fail of: that is written too.
    errors = Location.parse(tmp_path / "errors.jsonl")
    task = Task(model="slow", input=source, output=place, errors=errors, column="s", result="output", window=500)
    async with open_broker(load_settings(service.config).settings) as broker, prepared(task) as ready:
        await ready.run(broker, found.append)
    assert [told for told in found if 0 < told.rows < ROWS]
    for told in found:
        assert told.ratio == pytest.approx(told.rows / ROWS, abs=0.05) if told.rows else told.ratio is None


async def test_a_stop_that_comes_while_the_output_gets_its_name_is_too_late(
    service: Bulk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, told_to_stop = threading.Event(), threading.Event()
    told_progress: list[Progress] = []

    class Slow(MemoryFileSystem):  # type: ignore[misc]  # fsspec is untyped
        protocol = "slow"

        def _open(self, path: str, mode: str = "rb", **options: object) -> object:
            if path.endswith("/out.jsonl"):
                begun.set()
                assert told_to_stop.wait(30)
            return super()._open(path, mode, **options)

    fsspec.register_implementation("slow", Slow, clobber=True)
    write(tmp_path, [{"s": 0.0}])
    monkeypatch.chdir(tmp_path)
    place = Location.parse("slow://late/out.jsonl")
    source = Location.parse("in.jsonl")
    task = Task(model="slow", input=source, output=place, errors=None, column="s", result="output")
    async with open_broker(load_settings(service.config).settings) as broker, prepared(task) as ready:
        running = asyncio.create_task(ready.run(broker, told_progress.append))
        assert await asyncio.to_thread(begun.wait, 30)
        running.cancel()
        told_to_stop.set()
        done = await running
    assert done.succeeded == told_progress[-1].succeeded == 1
    assert exists(place)
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_files_may_be_called_as_a_command_and_options_may_come_first(service: Bulk, tmp_path: Path) -> None:
    write(tmp_path, [{"id": 0, "s": 0.0}])
    for name in ("list", "run"):
        (tmp_path / "in.jsonl").rename(tmp_path / name)
        options = ("--model", "slow", "--column", "s", "--input-format", "jsonl", "--overwrite")
        named = f"./{name}" if name == "list" else name
        told(service, tmp_path, *options, named, "out.jsonl")
        assert output(tmp_path) == [0]
        (tmp_path / name).rename(tmp_path / "in.jsonl")


def test_the_help_shows_how_files_are_run_and_how_runs_are_steered(service: Bulk, tmp_path: Path) -> None:
    shown = service.bulk("--help", folder=tmp_path).stdout
    for part in ("INPUT", "OUTPUT", "--model", "--resume", "list", "show", "pause", "cancel"):
        assert part in shown
