"""`sheaf bulk` as its users run it: a real broker, a real worker, and whatever may end in the middle."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis

from tests.bulk.files import columns_of, out
from tests.bulk.files import write as put
from tests.bulk.running import Bulk, running
from tests.conftest import wait_until
from tests.services import SHEAF
from tests.workers.conftest import held

MODELS: dict[str, object] = {
    "minilm": {"max_batch_size": 32},
    "echo": {"handler": "inference.handlers.echo:Echo", "max_batch_size": 64, "max_wait_ms": 0},
    "slow": {"handler": "tests.workers.handlers:Sleeper", "max_batch_size": 16, "max_wait_ms": 0},
    "picky": {"handler": "tests.workers.handlers:Picky", "max_batch_size": 16, "max_wait_ms": 0},
    "broken": {"handler": "no.such.module:Class"},
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bulk]:
    folder = tmp_path_factory.mktemp("bulk")
    with running(folder, MODELS) as made:
        write(folder / "first.jsonl", [{"text": "a"}])
        done = made.bulk("first.jsonl", "first.out.jsonl", "--model", "minilm", folder=folder)
        assert done.returncode == 0, done.stderr
        yield made


def write(path: Path, rows: Iterable[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def checkpoint(folder: Path, output: str = "out.jsonl") -> Mapping[str, object]:
    try:
        found: dict[str, object] = json.loads((folder / f"{output}.checkpoint").read_text())
    except FileNotFoundError:
        return {"rows_done": 0}
    return found


def test_every_row_gets_its_vector_in_order_and_nothing_is_left_in_the_broker(service: Bulk, tmp_path: Path) -> None:
    texts = ["word " * (1 + number * 7 % 30) for number in range(150)]
    write(tmp_path / "in.jsonl", [{"id": number, "text": text, "more": [1]} for number, text in enumerate(texts)])
    done = service.bulk("in.jsonl", "out.jsonl", "--model", "minilm", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["rows"], summary["succeeded"], summary["failed"], summary["errors"]) == (150, 150, 0, None)
    rows = read(tmp_path / "out.jsonl")
    assert [(row["id"], row["text"], row["more"]) for row in rows] == [(n, t, [1]) for n, t in enumerate(texts)]
    for row in rows:
        vector = row["embedding"]
        assert isinstance(vector, list)
        assert sum(value * value for value in vector) == pytest.approx(1.0, abs=1e-3)
    assert service.kept() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_rows_that_fail_are_told_of_with_line_input_and_reason(service: Bulk, tmp_path: Path) -> None:
    lines = [
        '{"id": "a", "n": 1}',
        "{bad",
        '{"id": "b"}',
        '{"id": "c", "n": -1}',
        "",
        '{"id": "d", "n": "x"}',
        '{"n": 2}',
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    arguments = (
        "in.jsonl",
        "out.jsonl",
        "--model",
        "picky",
        "--column",
        "n",
        "--id-column",
        "id",
        "--errors",
        "e.jsonl",
    )
    done = service.bulk(*arguments, folder=tmp_path)
    assert done.returncode == 3
    assert "e.jsonl" in done.stderr
    assert read(tmp_path / "out.jsonl") == [{"id": "a", "n": 1, "output": 1.0}, {"n": 2, "output": 2.0}]
    errors = read(tmp_path / "e.jsonl")
    assert [(error["row"], error["line"], error["id"], error["input"]) for error in errors] == [
        (1, 2, None, "{bad"),
        (2, 3, "b", None),
        (3, 4, "c", -1),
        (4, 6, "d", "x"),
    ]
    kinds = [error["error"]["type"] for error in errors]  # type: ignore[index]  # an object
    assert kinds == ["invalid_json_line", "missing_column", "ArithmeticError", "ValueError"]


@pytest.mark.parametrize("name", ["in.csv", "in.tsv.gz", "in.parquet"])
def test_an_input_with_a_column_of_the_results_name_is_refused_before_any_row_is_run(
    service: Bulk, tmp_path: Path, name: str
) -> None:
    put(tmp_path / name, out([{"text": "a", "embedding": "dear", "more": "x"}]))
    done = service.bulk(name, "out.jsonl", "--model", "minilm", folder=tmp_path)
    assert done.returncode == 1
    assert f"{name} has a column 'embedding' already" in done.stderr
    assert "--result-column" in done.stderr
    taken = service.bulk(name, "out.jsonl", "--model", "minilm", "--result-column", "more", folder=tmp_path)
    assert "has a column 'more' already" in taken.stderr
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert service.bulk(name, "out.jsonl", "--model", "minilm", "--result-column", "v", folder=tmp_path).returncode == 0
    [row] = read(tmp_path / "out.jsonl")
    assert row["embedding"] == "dear"


@pytest.mark.parametrize("output", ["out.jsonl", "out.csv", "out.parquet"])
def test_a_json_line_with_a_column_of_the_results_name_fails(service: Bulk, tmp_path: Path, output: str) -> None:
    write(tmp_path / "in.jsonl", [{"n": 1, "output": "dear"}, {"n": 2}])
    done = service.bulk("in.jsonl", output, "--model", "echo", "--column", "n", folder=tmp_path)
    assert done.returncode == 3
    assert [{name: int(str(value)) for name, value in row.items()} for row in columns_of(tmp_path / output)] == [
        {"n": 2, "output": 2}
    ]
    [error] = read(tmp_path / f"{output}.errors.jsonl")
    assert error["row"] == 0
    assert error["error"]["type"] == "column_taken"  # type: ignore[index]  # an object
    assert "--result-column" in error["error"]["message"]  # type: ignore[index]  # an object


def test_a_runner_that_is_killed_goes_on_where_it_was(service: Bulk, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [{"id": number, "s": 0.05} for number in range(4000)])
    before_all = set(service.kept())
    arguments = ("in.jsonl", "out.jsonl", "--model", "slow", "--column", "s", "--window", "256")
    for kills in range(2):
        before = checkpoint(tmp_path)["rows_done"]
        process = service.begin(*arguments, *(["--resume"] if kills else []), folder=tmp_path)
        wait_until(lambda before=before: checkpoint(tmp_path)["rows_done"] > before, description="rows are done")  # type: ignore[misc]
        process.kill()
        process.wait()
        assert not (tmp_path / "out.jsonl").exists()
    refused = service.bulk(*arguments, folder=tmp_path)
    assert refused.returncode == 1
    assert "resume" in refused.stderr
    done = service.bulk(*arguments, "--resume", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["resumed_from"] > 0
    assert [row["id"] for row in read(tmp_path / "out.jsonl")] == list(range(4000))
    # Of what killed ones had under way nothing is left, unless that it was cancelled.
    with redis.Redis.from_url(service.broker.url) as client:
        left = {key for key in service.kept() if key.startswith(b"celery-task-meta-")} - before_all
        stored = [json.loads(client.get(key) or b"") for key in left]
    assert {result["sheaf"]["status"] for result in stored} <= {"cancelled"}


def test_what_is_asked_to_be_resumed_and_overwritten_goes_on_where_it_was(service: Bulk, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [{"id": number, "s": 0.05} for number in range(2000)])
    write(tmp_path / "out.jsonl", [{"id": "old"}])
    arguments = ("in.jsonl", "out.jsonl", "--model", "slow", "--column", "s", "--window", "256", "--overwrite")
    process = service.begin(*arguments, folder=tmp_path)
    wait_until(lambda: int(str(checkpoint(tmp_path)["rows_done"])) > 0, description="rows are done")
    process.kill()
    process.wait()
    assert read(tmp_path / "out.jsonl") == [{"id": "old"}]
    done = service.bulk(*arguments, "--resume", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["resumed_from"] > 0
    assert [row["id"] for row in read(tmp_path / "out.jsonl")] == list(range(2000))


def test_a_runner_that_is_told_to_stop_takes_back_what_it_has_not_done(service: Bulk, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [{"id": number, "s": 0.05} for number in range(2000)])
    before = set(service.kept())
    process = service.begin("in.jsonl", "out.jsonl", "--model", "slow", "--column", "s", folder=tmp_path)
    wait_until(lambda: held(service.broker.url, "infer.slow"), description="rows are under way")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 130
    assert "--resume goes on" in (tmp_path / "bulk.log").read_text()
    assert checkpoint(tmp_path)["complete"] is False
    with redis.Redis.from_url(service.broker.url) as client:
        stored = [json.loads(client.get(key) or b"") for key in client.keys("celery-task-meta-*") if key not in before]
    assert {result["sheaf"]["status"] for result in stored} == {"cancelled"}


def test_a_worker_and_a_broker_that_are_killed_lose_no_row(service: Bulk, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [{"id": number, "s": 0.05} for number in range(3000)])
    arguments = ("in.jsonl", "out.jsonl", "--model", "slow", "--column", "s", "--window", "256")
    process = service.begin(*arguments, folder=tmp_path)
    wait_until(lambda: held(service.broker.url, "infer.slow"), description="rows are under way")
    service.replace_worker()
    wait_until(lambda: int(str(checkpoint(tmp_path)["rows_done"])) > 500, description="rows are done", timeout_s=40)
    service.broker.kill()
    log = tmp_path / "bulk.log"
    wait_until(lambda: "sheaf: the broker is away" in log.read_text(), description="the run has seen that it is away")
    service.broker.start()
    assert process.wait(60) == 0, log.read_text()
    said = log.read_text()
    assert said.count("sheaf: the broker is away; rows wait, and go on when it is back\n") == 1
    assert said.count("sheaf: the broker is back; rows go on\n") == 1
    assert all(line.startswith("sheaf: ") for line in said.splitlines()), said
    assert [row["id"] for row in read(tmp_path / "out.jsonl")] == list(range(3000))


def test_an_input_that_has_changed_is_not_gone_on_with(service: Bulk, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [{"s": 0.05}] * 1000)
    arguments = ("in.jsonl", "out.jsonl", "--model", "slow", "--column", "s")
    process = service.begin(*arguments, folder=tmp_path)
    wait_until(lambda: (tmp_path / "out.jsonl.checkpoint").exists(), description="it has begun")
    process.kill()
    process.wait()
    write(tmp_path / "in.jsonl", [{"s": 0.0}] * 10)
    refused = service.bulk(*arguments, "--resume", folder=tmp_path)
    assert refused.returncode == 1
    assert "the input changed since the checkpoint" in refused.stderr
    assert service.bulk(*arguments, "--overwrite", folder=tmp_path).returncode == 0
    assert len(read(tmp_path / "out.jsonl")) == 10


def test_a_finished_run_is_not_gone_on_with_and_its_output_is_said_to_be_whole(service: Bulk, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [{"n": 1}])
    arguments = ("in.jsonl", "out.jsonl", "--model", "echo")
    assert service.bulk(*arguments, "--resume", folder=tmp_path).returncode == 0
    again = service.bulk(*arguments, "--resume", folder=tmp_path)
    # Whether the output is of this input cannot be known, so this is no success.
    assert again.returncode == 1
    assert "if it was this run's, nothing is left to do" in again.stderr
    assert service.bulk(*arguments, "--resume", "--overwrite", folder=tmp_path).returncode == 0


@pytest.mark.parametrize(("name", "content"), [("in.csv", "text\n"), ("in.jsonl", ""), ("in.jsonl", "{}\n")])
def test_vectors_have_their_type_in_parquet_where_there_are_none(
    service: Bulk, tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / name).write_text(content)
    done = service.bulk(name, "out.parquet", "--model", "minilm", folder=tmp_path)
    assert done.returncode == (3 if content == "{}\n" else 0), done.stderr
    schema = pq.read_schema(tmp_path / "out.parquet")
    assert schema.names == (["text", "embedding"] if name == "in.csv" else ["embedding"])
    assert schema.field("embedding").type == pa.list_(pa.float32())


def test_pipes_and_packed_files(service: Bulk, tmp_path: Path) -> None:
    rows = b"".join(json.dumps({"n": number}).encode() + b"\n" for number in range(300))
    command = [SHEAF, "--config", str(service.config), "bulk", "-", "-", "--model", "echo", "--column", "n"]
    formats = ["--input-format", "jsonl", "--output-format", "csv"]
    done = subprocess.run([*command, *formats], input=rows, capture_output=True, check=True, cwd=tmp_path, timeout=60)
    assert done.stdout.split() == [b"n,output", *(f"{number},{number}".encode() for number in range(300))]
    (tmp_path / "in.csv.gz").write_bytes(gzip.compress(b'id,text\r\n1,"two\nlines"\r\n2,\xc3\xbc\r\n'))
    assert service.bulk("in.csv.gz", "out.jsonl.zst", "--model", "minilm", folder=tmp_path).returncode == 0
    again = service.bulk("out.jsonl.zst", "plain.jsonl", "--model", "echo", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert [row["text"] for row in read(tmp_path / "plain.jsonl")] == ["two\nlines", "ü"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_packed_text_goes_through_pipes_where_it_is_said_to_be_packed(
    service: Bulk, tmp_path: Path, suffix: str
) -> None:
    put(tmp_path / f"in.jsonl{suffix}", out([{"n": number} for number in range(300)]))
    command = [SHEAF, "--config", str(service.config), "bulk", "-", "-", "--model", "echo", "--column", "n"]

    def piped(read_as: str) -> subprocess.CompletedProcess[bytes]:
        formats = ["--input-format", read_as, "--output-format", f"csv{suffix}"]
        with (tmp_path / f"in.jsonl{suffix}").open("rb") as source:
            return subprocess.run(
                [*command, *formats], stdin=source, capture_output=True, cwd=tmp_path, timeout=60, check=False
            )

    done = piped(f"jsonl{suffix}")
    assert done.returncode == 0, done.stderr
    (tmp_path / f"out.csv{suffix}").write_bytes(done.stdout)
    assert columns_of(tmp_path / f"out.csv{suffix}") == [{"n": f"{n}", "output": f"{n}"} for n in range(300)]
    # A file without a suffix is read so, too.
    (tmp_path / f"in.jsonl{suffix}").rename(tmp_path / "in")
    named = ("in", "plain", "--model", "echo", "--input-format", f"jsonl{suffix}", "--output-format", "jsonl")
    assert service.bulk(*named, folder=tmp_path).returncode == 0
    assert len(read(tmp_path / "plain")) == 300
    (tmp_path / "in").rename(tmp_path / f"in.jsonl{suffix}")
    unsaid = piped("jsonl")
    assert unsaid.returncode == 1
    assert f"or --input-format, should end in {suffix}" in unsaid.stderr.decode()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("in.csv", "out.csv", "--model", "minilm"), "in.csv has no column 'text'; it has id, name"),
        (("in.csv", "out.csv", "--model", "echo", "--id-column", "key"), "no column 'key'"),
        (("none.csv", "out.csv", "--model", "echo"), "No such file"),
        (("in.csv", "none/out.csv", "--model", "echo"), "there is no folder"),
        (
            ("in.csv", "there.csv", "--model", "echo"),
            "it is there already: choose another name, or replace it with --ov",
        ),
        (("in.csv", "out.csv", "--model", "broken"), "no worker could load broken"),
    ],
)
def test_what_cannot_be_done_is_told_and_leaves_nothing(
    service: Bulk, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    for name in ("in.csv", "there.csv"):
        (tmp_path / name).write_text("id,name\n1,a\n")
    done = service.bulk(*arguments, folder=tmp_path)
    assert done.returncode == 1
    assert said in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv", "there.csv"]


ECHO = ("--model", "echo")
CSVS = ("--input-format", "csv", "--output-format", "csv")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("in.csv", "out.csv", "--model", "none"), "--model none: the settings name minilm, echo"),
        (("in.csv", "out.csv", *ECHO, "--input-format", "xml"), "--input-format xml: it is one of jsonl"),
        (("in.csv", "out.csv", *ECHO, "--output-format", ""), "--output-format : it is one of jsonl"),
        (("in.csv", "out.csv", *ECHO, "--errors", ""), "--errors: '' names no file"),
        (("", "out.csv", *ECHO), "INPUT: '' names no file"),
        (("in.csv", "out.txt", *ECHO), "name its format with --output-format"),
        (("in", "out.csv", *ECHO), "name its format with --input-format"),
        (("-", "out.csv", *ECHO), "INPUT: - has none of the suffixes"),
        (("in.csv", "-", *ECHO), "OUTPUT: - has none of the suffixes"),
        (("in.csv", "out.parquet.gz", *ECHO), "Parquet is packed inside"),
        (("in.csv", "-", *ECHO, "--output-format", "parquet"), "a pipe cannot hold it"),
        (("-", "-", *ECHO, *CSVS, "--resume"), "--resume: neither standard input"),
        (("in.csv", "out.csv", *ECHO, "--column", "id", "--result-column", "id"), "--result-column id: it is what"),
        (("in.csv", "out.csv", *ECHO, "--window", "0"), "--window"),
    ],
)
def test_a_wrong_option_is_named_with_an_exit_code_of_its_own(
    service: Bulk, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "in.csv").write_text("id,name\n1,a\n")
    done = service.bulk(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("in.csv", "./in.csv"), "INPUT and OUTPUT"),
        (("in.csv", "{folder}/in.csv"), "INPUT and OUTPUT"),
        (("in.csv", "symlink.csv"), "INPUT and OUTPUT"),
        (("in.csv", "hardlink.csv"), "INPUT and OUTPUT"),
        (("in.csv", "out.csv", "--errors", "symlink.csv"), "INPUT and --errors"),
        (("in.csv", "out.csv", "--errors", "out.csv"), "OUTPUT and --errors"),
        (("in.csv", "out.csv", "--errors", "out.csv.partial"), "OUTPUT.partial and --errors"),
        (("in.csv", "out.csv", "--errors", "out.csv.checkpoint"), "OUTPUT.checkpoint and --errors"),
        (("in.csv", "e.partial", "--errors", "e", "--output-format", "csv"), "OUTPUT and --errors.partial"),
        (("in.csv", "out.parquet", "--errors", "out.parquet.parts/e"), "OUTPUT.parts and --errors"),
        (("out.csv.errors.jsonl", "out.csv"), "INPUT and --errors"),
        (("in.csv", "-", "--output-format", "csv", "--errors", "-"), "OUTPUT and --errors"),
        (("s3://rows/in.csv", "s3a://rows/in.csv"), "INPUT and OUTPUT"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--overwrite",), ("--resume",)])
def test_no_two_files_of_a_run_are_one(
    service: Bulk, tmp_path: Path, arguments: tuple[str, ...], said: str, more: tuple[str, ...]
) -> None:
    if more == ("--resume",) and "-" in arguments:
        more = ()
    (tmp_path / "in.csv").write_text("id,name\n1,a\n")
    (tmp_path / "symlink.csv").symlink_to("in.csv")
    (tmp_path / "hardlink.csv").hardlink_to(tmp_path / "in.csv")
    before = sorted(path.name for path in tmp_path.iterdir())
    named = [argument.format(folder=tmp_path) for argument in arguments]
    done = service.bulk(*named, *ECHO, *more, folder=tmp_path)
    assert done.returncode == 2
    assert f"{said} are one and the same file" in done.stderr
    assert (tmp_path / "in.csv").read_text() == "id,name\n1,a\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == before
