"""Files as OpenAI's own client sends and fetches them, and what others may send instead."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import httpx
import openai
import psutil
import pytest

from broker import AsyncBroker, FileRecord, Scope
from tests.api.front import Front, front
from tests.api.raw import answer_of, connect
from tests.conftest import free_port, wait_until
from tests.services import Service

ROWS = b'{"custom_id":"1"}\n{"custom_id":"2"}\n'
LARGE = 200 << 20
#: Of a process that holds nothing of a file: the server's own buffers, and what the allocator keeps.
FLAT_BYTES = 40 << 20
MAX_BYTES = 300_000
QUOTA_BYTES = 400_000
BOUNDARY = "a-boundary"
FORM = f"multipart/form-data; boundary={BOUNDARY}"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """With bounds that no test meets."""
    with front(tmp_path_factory.mktemp("files")) as made:
        made.key("somebody")
        yield made


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """With bounds that tests meet."""
    bounds = {"max_bytes": MAX_BYTES, "quota_bytes": QUOTA_BYTES, "quota_files": 4}
    with front(tmp_path_factory.mktemp("small"), files=bounds, api={"body_timeout_s": 1}) as made:
        made.key("somebody")
        yield made


@pytest.fixture
def client(shop: Front, request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    """Of an owner who has no files yet."""
    key = shop.key(request.node.name)
    with openai.OpenAI(api_key=key, base_url=f"{shop.base}/v1", max_retries=0) as client:
        yield client


@pytest.fixture
def owner(small: Front, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    with small.client(small.key(request.node.name)) as client:
        yield client
        for file in client.get("/v1/files").json()["data"]:
            client.delete(f"/v1/files/{file['id']}")
    wait_until(lambda: not stored(small), description="nothing is left of the test's files")


def part(name: str, content: bytes, filename: str | bytes | None = None, *headers: str) -> bytes:
    disposition = f'Content-Disposition: form-data; name="{name}"'.encode()
    if filename is not None:
        raw = filename if isinstance(filename, bytes) else filename.encode()
        disposition += b'; filename="' + raw + b'"'
    lines = [disposition, *(header.encode() for header in headers)]
    return f"--{BOUNDARY}\r\n".encode() + b"\r\n".join(lines) + b"\r\n\r\n" + content + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def upload(client: httpx.Client, content: bytes = ROWS, headers: Mapping[str, str] | None = None) -> httpx.Response:
    body = form(part("purpose", b"batch"), part("file", content, "rows.jsonl"))
    return client.post("/v1/files", content=body, headers={"content-type": FORM, **(headers or {})})


def stored(made: Front) -> list[Path]:
    """All that lies in the storage."""
    return [path for path in (made.folder / "api" / "var" / "files").rglob("*") if path.is_file()]


def kind_of(answer: httpx.Response) -> str:
    """The problem's slug; the problem is checked to be one as OpenAI's client reads it too."""
    problem = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert problem["error"]["message"] == problem["detail"]
    assert problem["status"] == answer.status_code
    assert "/var/" not in answer.text
    return str(problem["type"].removeprefix("urn:sheaf:error:"))


# What the client does.


def test_a_file_goes_up_is_told_of_comes_back_and_is_deleted(client: openai.OpenAI, shop: Front) -> None:
    before = time.time()
    made = client.files.create(file=("rows.jsonl", ROWS), purpose="batch")
    assert re.fullmatch(r"file-[0-9a-f]{32}", made.id)
    assert (made.object, made.filename, made.purpose, made.bytes) == ("file", "rows.jsonl", "batch", len(ROWS))
    assert made.status == "processed"
    assert before - 1 <= made.created_at <= time.time()
    assert made.expires_at is not None
    assert made.expires_at - made.created_at == 30 * 86_400
    assert client.files.retrieve(made.id) == made
    content = client.files.content(made.id)
    assert content.read() == ROWS
    assert content.response.headers["content-length"] == str(len(ROWS))
    assert content.response.headers["content-disposition"] == 'attachment; filename="rows.jsonl"'
    assert (shop.folder / "api" / "var" / "files" / made.id).is_file()
    deleted = client.files.delete(made.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (made.id, True, "file")
    assert not (shop.folder / "api" / "var" / "files" / made.id).exists()
    for asked in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="no file"):
            asked(made.id)


def test_an_empty_file_is_taken(client: openai.OpenAI) -> None:
    made = client.files.create(file=("empty.jsonl", b""), purpose="batch")
    assert made.bytes == 0
    assert client.files.content(made.id).read() == b""


def test_the_client_says_how_long_a_file_is_kept(client: openai.OpenAI) -> None:
    made = client.files.create(
        file=("rows.jsonl", ROWS), purpose="batch", expires_after={"anchor": "created_at", "seconds": 7200}
    )
    assert made.expires_at == made.created_at + 7200
    with pytest.raises(openai.UnprocessableEntityError, match="3600 to 2592000") as caught:
        client.files.create(
            file=("rows.jsonl", ROWS), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3599}
        )
    assert caught.value.param == "expires_after.seconds"


def test_another_purpose_is_refused_and_the_one_that_is_taken_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.UnprocessableEntityError, match=r"'fine-tune' is not taken.*`batch`") as caught:
        client.files.create(file=("rows.jsonl", ROWS), purpose="fine-tune")
    assert caught.value.param == "purpose"
    assert client.files.list().data == []


def test_files_are_listed_in_pages_and_by_purpose(client: openai.OpenAI) -> None:
    made = [client.files.create(file=(f"{number}.jsonl", b""), purpose="batch").id for number in range(5)]
    assert sorted(file.id for file in client.files.list(limit=2)) == sorted(made)
    page = client.files.list(limit=2)
    assert (len(page.data), page.has_more) == (2, True)
    assert not client.files.list(limit=2, after=client.files.list().data[-3].id).has_more
    newest = [file.id for file in client.files.list()]
    assert [file.id for file in client.files.list(order="asc", limit=3)] == newest[::-1]
    assert len(list(client.files.list(purpose="batch"))) == 5
    assert list(client.files.list(purpose="batch_output")) == []
    with pytest.raises(openai.UnprocessableEntityError, match="after: there is no file 'file-x'"):
        client.files.list(after="file-x")


def test_a_large_file_goes_both_ways_in_little_memory(client: openai.OpenAI, shop: Front, tmp_path: Path) -> None:
    source, target = tmp_path / "large.jsonl", tmp_path / "back.jsonl"
    block = os.urandom(1 << 20)
    with source.open("wb") as file:
        for _ in range(LARGE >> 20):
            file.write(block)
    with shop.client(client.api_key) as plain:
        upload(plain)
    before = _peak(shop.service, reset=True)
    with source.open("rb") as file:
        made = client.files.create(file=("large.jsonl", file), purpose="batch", timeout=100)
    assert made.bytes == LARGE
    with client.files.with_streaming_response.content(made.id) as content:
        content.stream_to_file(target)
    assert _peak(shop.service) - before < FLAT_BYTES
    assert target.stat().st_size == LARGE
    assert target.read_bytes()[-(1 << 20) :] == block
    client.files.delete(made.id)


def _peak(service: Service, *, reset: bool = False) -> int:
    """The most memory that a process has had since the last reset, bytes."""
    if reset:
        Path(f"/proc/{service.pid}/clear_refs").write_text("5")
    status = Path(f"/proc/{service.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


# Whose files they are.


def test_another_owners_file_does_not_exist(client: openai.OpenAI, shop: Front) -> None:
    made = client.files.create(file=("rows.jsonl", ROWS), purpose="batch")
    with shop.client(shop.key("a stranger")) as stranger:
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            assert kind_of(stranger.request(method, f"/v1/files/{made.id}{path}")) == "unknown-file"
        assert stranger.get("/v1/files").json()["data"] == []
        assert stranger.get("/v1/files", params={"after": made.id}).status_code == 422
    with shop.client(shop.key("the boss", Scope.ADMIN)) as admin:
        assert admin.get(f"/v1/files/{made.id}/content").content == ROWS


def test_writing_and_reading_need_their_scopes(shop: Front) -> None:
    with shop.client(shop.key("half", Scope.SUBMIT)) as writer, shop.client(shop.key("half", Scope.READ)) as reader:
        made = upload(writer).json()["id"]
        assert kind_of(upload(reader)) == "missing-scope"
        for path in ("/v1/files", f"/v1/files/{made}", f"/v1/files/{made}/content"):
            assert kind_of(writer.get(path)) == "missing-scope"
            assert reader.get(path).status_code == 200
        assert kind_of(reader.delete(f"/v1/files/{made}")) == "missing-scope"
        assert writer.delete(f"/v1/files/{made}").status_code == 200
    with shop.client() as nobody:
        assert kind_of(upload(nobody)) == "unauthenticated"


def test_a_web_page_cannot_upload_where_no_key_is_asked_for(tmp_path: Path) -> None:
    with front(tmp_path) as open_to_all, open_to_all.client() as client:
        assert kind_of(upload(client, headers={"origin": "https://evil.example"})) == "cross-origin"
        assert kind_of(upload(client, headers={"origin": "null"})) == "cross-origin"
        assert stored(open_to_all) == []
        made = upload(client, headers={"origin": open_to_all.base}).json()["id"]
        assert client.get(f"/v1/files/{made}/content").content == ROWS


# Bounds.


def test_a_file_may_have_max_bytes_and_not_one_more(owner: httpx.Client, small: Front) -> None:
    assert upload(owner, b"x" * MAX_BYTES).status_code == 200
    answer = upload(owner, b"x" * (MAX_BYTES + 1))
    assert (answer.status_code, kind_of(answer)) == (413, "file-too-large")
    assert str(MAX_BYTES) in answer.json()["detail"]
    assert len(stored(small)) == 1


def test_a_file_of_unknown_length_is_refused_where_it_becomes_too_large(owner: httpx.Client, small: Front) -> None:
    def endless() -> Iterator[bytes]:
        yield form(part("purpose", b"batch"), part("file", b"", "rows.jsonl"))[: -len(BOUNDARY) - 8]
        for _ in range(1000):
            yield b"x" * 10_000

    answer = owner.post("/v1/files", content=endless(), headers={"content-type": FORM})
    assert kind_of(answer) == "file-too-large"
    assert answer.headers["connection"] == "close"
    assert stored(small) == []


def test_a_declared_length_that_is_too_much_is_refused_before_anything_comes(small: Front) -> None:
    key = small.key("declared")
    with connect(int(small.base.rpartition(":")[2])) as connection:
        head = f"POST /v1/files HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\ncontent-type: {FORM}\r\n"
        connection.sendall(f"{head}content-length: 999999999999\r\nexpect: 100-continue\r\n\r\n".encode())
        assert answer_of(connection).status == 413


def test_a_quota_says_how_much_of_it_is_used(owner: httpx.Client, small: Front) -> None:
    first = upload(owner, b"x" * 250_000).json()["id"]
    answer = upload(owner, b"x" * 150_001)
    assert (answer.status_code, kind_of(answer)) == (403, "file-quota")
    assert (answer.json()["used_bytes"], answer.json()["quota_bytes"]) == (250_000, QUOTA_BYTES)
    second = upload(owner, b"x" * 150_000).json()["id"]
    assert {path.name for path in stored(small)} == {first, second}


def test_an_owner_may_have_so_many_files(owner: httpx.Client) -> None:
    assert [upload(owner).status_code for _ in range(4)] == [200] * 4
    answer = upload(owner)
    assert (answer.status_code, kind_of(answer)) == (403, "file-quota")
    assert "files.quota_files" in answer.json()["detail"]


def test_two_uploads_at_once_do_not_pass_the_quota_together(owner: httpx.Client) -> None:
    together = threading.Barrier(4)
    body = form(part("purpose", b"batch"), part("file", b"x" * 150_000, "rows.jsonl"))

    def slowly() -> Iterator[bytes]:
        yield body[:-100]
        together.wait(20)
        yield body[-100:]

    def send(_: int) -> httpx.Response:
        return owner.post("/v1/files", content=slowly(), headers={"content-type": FORM})

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(send, range(4)))
    assert sorted(answer.status_code for answer in answers) == [200, 200, 403, 403]
    assert len(owner.get("/v1/files").json()["data"]) == 2


def test_an_upload_whose_caller_goes_away_leaves_nothing(owner: httpx.Client, small: Front) -> None:
    with _half_sent(small, owner, 200_000):
        wait_until(lambda: stored(small), description="it is being written")
    wait_until(lambda: not stored(small), description="what was written is gone")
    wait_until(lambda: upload(owner, b"x" * MAX_BYTES).status_code == 200, description="nor does it count")


def test_an_upload_that_does_not_go_on_is_cut_off_and_leaves_nothing(owner: httpx.Client, small: Front) -> None:
    with _half_sent(small, owner, 200_000) as connection:
        answer = answer_of(connection)
    assert answer.status == 408
    wait_until(lambda: not stored(small), description="what was written is gone")


def _half_sent(small: Front, owner: httpx.Client, size: int) -> socket.socket:
    body = form(part("purpose", b"batch"), part("file", b"x" * size, "rows.jsonl"))
    connection = connect(int(small.base.rpartition(":")[2]))
    head = "POST /v1/files HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    head += f"authorization: {owner.headers['authorization']}\r\ncontent-type: {FORM}\r\n"
    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[: size // 2])
    return connection


def test_a_disk_that_is_full_is_told_and_leaves_nothing(owner: httpx.Client, small: Front) -> None:
    before = resource.prlimit(small.service.pid, resource.RLIMIT_FSIZE)
    # The kernel refuses to let a file of the server's grow beyond that, as a full disk does.
    resource.prlimit(small.service.pid, resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        answer = upload(owner, b"x" * 200_000)
    finally:
        resource.prlimit(small.service.pid, resource.RLIMIT_FSIZE, before)
    assert (answer.status_code, kind_of(answer)) == (507, "storage-full")
    assert stored(small) == []
    assert upload(owner, b"x").status_code == 200


def test_a_storage_that_fails_is_told_without_its_address(tmp_path: Path) -> None:
    storage = {"storage": "ftp://somebody:hidden@127.0.0.1:1/files"}
    with front(tmp_path, files=storage) as made, made.client() as client:
        answer = upload(client)
        assert (answer.status_code, kind_of(answer)) == (503, "storage-unavailable")
        assert "hidden" not in answer.text
        assert "hidden" not in made.service.log()
        assert "ftp" not in answer.text
        assert "hidden" not in made.sheaf("config", "show")


def test_a_reader_that_goes_away_stops_the_reading(client: openai.OpenAI, shop: Front, tmp_path: Path) -> None:
    made = client.files.create(file=("large.jsonl", b"x" * (100 << 20)), purpose="batch")
    process = psutil.Process(shop.service.pid)

    def is_open() -> bool:
        return any(made.id in file.path for file in process.open_files())

    before = process.io_counters().read_chars
    with connect(int(shop.base.rpartition(":")[2])) as connection:
        head = f"GET /v1/files/{made.id}/content HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        connection.sendall(f"{head}authorization: Bearer {client.api_key}\r\n\r\n".encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        assert is_open()
    wait_until(lambda: not is_open(), description="the file is closed")
    assert process.io_counters().read_chars - before < 50 << 20
    client.files.delete(made.id)


def test_the_head_of_a_file_tells_its_size_alone(client: openai.OpenAI, shop: Front) -> None:
    made = client.files.create(file=("rows.jsonl", ROWS), purpose="batch")
    with shop.client(client.api_key) as plain:
        answer = plain.head(f"/v1/files/{made.id}/content")
    assert (answer.status_code, answer.headers["content-length"], answer.content) == (200, str(len(ROWS)), b"")


# What others may send instead.

PURPOSE = part("purpose", b"batch")
FILE = part("file", ROWS, "rows.jsonl")


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        (form(PURPOSE), "file", "missing"),
        (form(FILE), "purpose", "missing"),
        (form(), "file", "missing"),
        (form(PURPOSE, FILE, FILE), "file", "twice"),
        (form(PURPOSE, PURPOSE, FILE), "purpose", "twice"),
        (form(PURPOSE, part("file", ROWS)), "file", "needs a name"),
        (form(PURPOSE, part("file", ROWS, "")), "file", "needs a name"),
        (form(PURPOSE, part("file", ROWS, "a/..")), "file", "needs a name"),
        (form(PURPOSE, part("file", ROWS, "a\x00b")), "file", "control characters"),
        (form(PURPOSE, part("file", ROWS, "a\x1b[2Jb")), "file", "control characters"),
        (form(PURPOSE, part("file", ROWS, b"\xff\xfe.jsonl")), "file", "not UTF-8"),
        (form(PURPOSE, part("file", ROWS, "x" * 256)), "file", "255 characters"),
        (form(PURPOSE, part("colour", b"red"), FILE), "colour", "no such field"),
        (form(part("purpose", b"x" * 2000), FILE), "purpose", "1024 bytes"),
        (form(part("purpose", b"\xff"), FILE), "purpose", "not taken"),
        (form(PURPOSE, part("file", ROWS, "a", "Content-Transfer-Encoding: base64")), "file", "base64"),
        (form(PURPOSE, part("expires_after[anchor]", b"created_at"), FILE), "expires_after.seconds", "3600"),
        (form(PURPOSE, part("expires_after[seconds]", b"7200"), FILE), "expires_after.anchor", "created_at"),
    ],
)
def test_a_form_that_lacks_or_misuses_a_part_is_told_which(
    owner: httpx.Client, small: Front, body: bytes, field: str, said: str
) -> None:
    answer = owner.post("/v1/files", content=body, headers={"content-type": FORM})
    assert (answer.status_code, kind_of(answer)) == (422, "invalid-request")
    [error] = answer.json()["errors"]
    assert error["field"] == field
    assert said in error["message"]
    assert stored(small) == []
    assert owner.get("/v1/files").json()["data"] == []


@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b"", FORM, 400),
        (b"no form at all", FORM, 400),
        (form(PURPOSE, FILE)[:-20], FORM, 400),
        (form(PURPOSE, FILE)[:40], FORM, 400),
        (form(PURPOSE, FILE).replace(b"form-data", b"attachment"), FORM, 400),
        (form(PURPOSE, FILE).replace(b"Content-Disposition", b"Content Disposition"), FORM, 400),
        (f"--{BOUNDARY}\r\n\r\nno headers\r\n--{BOUNDARY}--\r\n".encode(), FORM, 400),
        (form(part("file", ROWS, "a", "X: " + "x" * 100_000)), FORM, 400),
        (form(part("file", ROWS, "a", *("X: y" for _ in range(1000)))), FORM, 400),
        (form(PURPOSE, FILE) + b"x" * 100_000, FORM, 400),
        (form(PURPOSE, FILE), "multipart/form-data", 400),
        (form(PURPOSE, FILE), "multipart/form-data; boundary=" + "x" * 1000, 400),
        (form(PURPOSE, FILE), "multipart/mixed; boundary=" + BOUNDARY, 415),
        (b"{}", "application/json", 415),
        (b"purpose=batch", "application/x-www-form-urlencoded", 415),
        (b"", "", 415),
    ],
)
def test_a_body_that_is_no_such_form_is_refused(
    owner: httpx.Client, small: Front, body: bytes, content_type: str, status: int
) -> None:
    answer = owner.post("/v1/files", content=body, headers={"content-type": content_type})
    assert answer.status_code == status
    kind_of(answer)
    assert len(answer.content) < 2000
    assert stored(small) == []
    assert "Traceback" not in small.service.log()


def test_a_packed_form_is_not_unpacked(owner: httpx.Client) -> None:
    assert upload(owner, headers={"content-encoding": "gzip"}).status_code == 415


@pytest.mark.parametrize(
    ("sent", "kept", "disposition"),
    [
        ("../../etc/passwd", "passwd", 'attachment; filename="passwd"'),
        ("C:\\rows\\a.jsonl", "a.jsonl", 'attachment; filename="a.jsonl"'),
        (
            "\u00fcber \u20ac.jsonl",
            "\u00fcber \u20ac.jsonl",
            "attachment; filename=\"_ber _.jsonl\"; filename*=UTF-8''%C3%BCber%20%E2%82%AC.jsonl",
        ),
        ('a\\"b;%41.x', 'a"b;%41.x', "attachment; filename=\"a_b;_41.x\"; filename*=UTF-8''a%22b%3B%2541.x"),
    ],
)
def test_a_name_is_kept_without_folders_and_told_safely(
    owner: httpx.Client, sent: str, kept: str, disposition: str
) -> None:
    body = form(FILE.replace(b"rows.jsonl", sent.encode()), PURPOSE)
    made = owner.post("/v1/files", content=body, headers={"content-type": FORM}).json()
    assert made["filename"] == kept
    assert owner.get(f"/v1/files/{made['id']}/content").headers["content-disposition"] == disposition


def test_content_that_looks_like_the_forms_own_lines_comes_back_as_it_was(owner: httpx.Client) -> None:
    tricky = f"\r\n--{BOUNDARY[:-1]}\r\n--{BOUNDARY}x".replace(f"--{BOUNDARY}x", "--a-boundar").encode() + b"\r\n\r\n--"
    body = form(PURPOSE, part("file", tricky, "a"))
    for size in (1, 7, len(body)):
        pieces = (body[first : first + size] for first in range(0, len(body), size))
        made = owner.post("/v1/files", content=pieces, headers={"content-type": FORM}).json()
        assert owner.get(f"/v1/files/{made['id']}/content").content == tricky


@pytest.mark.parametrize(
    "file_id", ["file-x", "file-" + "0" * 32, "..%2f..%2fetc%2fpasswd", "file-" + "0" * 31 + "%0a"]
)
def test_an_id_that_there_is_not_is_a_problem_of_its_own(owner: httpx.Client, file_id: str) -> None:
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        answer = owner.request(method, f"/v1/files/{file_id}{path}")
        assert answer.status_code == 404
        assert kind_of(answer) in ("unknown-file", "not-found")


def test_a_file_whose_content_was_lost_is_told_so(owner: httpx.Client, small: Front) -> None:
    made = upload(owner).json()["id"]
    (small.folder / "api" / "var" / "files" / made).unlink()
    assert kind_of(owner.get(f"/v1/files/{made}/content")) == "unknown-file"
    assert owner.delete(f"/v1/files/{made}").status_code == 200


def test_a_file_goes_through_a_bucket_and_is_removed_from_there(s3: str, tmp_path: Path) -> None:
    content = os.urandom(40 << 20)
    bucket = fsspec.filesystem("s3")

    def kept() -> list[str]:
        bucket.invalidate_cache()
        return [path.rpartition("/")[2] for path in bucket.find("rows")]

    files = {"storage": f"{s3}/prefix", "ttl_s": 1}
    with front(tmp_path, files=files, io={"metrics_port": free_port()}) as made, made.client() as plain:
        hour = [part("expires_after[anchor]", b"created_at"), part("expires_after[seconds]", b"3600")]
        body = form(PURPOSE, *hour, part("file", content, "a.jsonl"))
        large = plain.post("/v1/files", content=body, headers={"content-type": FORM}).json()["id"]
        assert plain.get(f"/v1/files/{large}/content").content == content
        broken = plain.post("/v1/files", content=body[:-20], headers={"content-type": FORM})
        assert kind_of(broken) == "bad-request"
        brief = upload(plain).json()["id"]
        assert sorted(kept()) == sorted([large, brief])
        wait_until(lambda: plain.get(f"/v1/files/{brief}").status_code == 404, description="its time is over")
        with Service("io", config=made.config, folder=tmp_path / "io") as io:
            wait_until(lambda: kept() == [large], description=f"it is removed: {io.log_path}")
        assert plain.delete(f"/v1/files/{large}").status_code == 200
        assert kept() == []


# Ends.


def test_the_io_worker_removes_what_has_expired_and_what_never_came_whole(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    config = {"storage": str(storage), "ttl_s": 1}
    with front(tmp_path, files=config, io={"metrics_port": free_port()}) as made, made.client() as client:
        brief = upload(client).json()["id"]
        body = form(
            PURPOSE, part("expires_after[anchor]", b"created_at"), part("expires_after[seconds]", b"3600"), FILE
        )
        lasting = client.post("/v1/files", content=body, headers={"content-type": FORM}).json()["id"]
        broken_off = "file-" + "f" * 32
        asyncio.run(_reserve(made.broker.url, broken_off))
        (storage / broken_off).write_bytes(b"stored, and its server killed")
        left = storage / f"{broken_off}.01234567.incoming"
        left.write_bytes(b"half")
        os.utime(left, (0, 0))
        wait_until(lambda: client.get(f"/v1/files/{brief}").status_code == 404, description="its time is over")
        with Service("io", config=made.config, folder=tmp_path / "io") as io:
            wait_until(lambda: os.listdir(storage) == [lasting], description=f"the rest is gone: {io.log_path}")
            wait_until(lambda: _used(made.broker.url) == len(ROWS), description="and does not count")
            io.send(signal.SIGTERM)
            assert io.wait(20) == 0
            assert "Traceback" not in io.log()
        assert client.get(f"/v1/files/{lasting}/content").content == ROWS


async def _reserve(url: str, file_id: str) -> None:
    broker = await AsyncBroker.open(url)
    await broker.files.reserve(FileRecord(file_id, "", "", "batch", 29, time.time() - 3600, time.time() - 1))
    await broker.close()


def _used(url: str) -> int:
    async def ask() -> int:
        broker = await AsyncBroker.open(url)
        try:
            return await broker.files.used_bytes("")
        finally:
            await broker.close()

    return asyncio.run(ask())


def test_the_log_of_a_refused_upload_has_no_trace(small: Front) -> None:
    lines = [json.loads(line) for line in small.service.log().splitlines() if line.startswith("{")]
    assert not [line for line in lines if "exc_info" in line]
