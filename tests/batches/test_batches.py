"""Batches from the upload to their output, by OpenAI's own client: what each line is answered, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import gzip
import time
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import redis
from celery.result import AsyncResult
from openai.types import CreateEmbeddingResponse

from bulk.client import open_broker
from configs import load_settings
from tests.batches.running import (
    Batches,
    answer_of,
    begin,
    begin_with,
    embedding,
    end_of,
    job,
    line,
    rows_of,
    running,
)
from tests.conftest import wait_until
from tests.workers.conftest import collected_events, of_task
from workers.app import make_app


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Batches]:
    limits = {"window": 200, "max_lines": 5000, "max_open": 3, "max_window_s": 172_800}
    with running(tmp_path_factory.mktemp("batches"), batches=limits) as made:
        yield made


@pytest.fixture
def client(batches: Batches) -> Iterator[openai.OpenAI]:
    with batches.client(f"owner-{uuid.uuid4().hex[:8]}") as client:
        yield client


def test_each_line_is_answered_as_over_http_and_in_order(client: openai.OpenAI) -> None:
    texts = [f"text {number} " * (1 + number % 9) for number in range(300)]
    lines = [embedding(f"line-{number}", text) for number, text in enumerate(texts)]
    batch = begin(client, lines, metadata={"project": "sheaf"})
    assert batch.status == "validating"
    assert batch.object == "batch"
    ended = end_of(client, batch)
    assert ended.status == "completed"
    assert ended.errors is None
    assert ended.error_file_id is None
    assert ended.metadata == {"project": "sheaf"}
    assert ended.request_counts is not None
    assert ended.request_counts.model_dump() == {"total": 300, "completed": 300, "failed": 0}
    moments = [ended.created_at, ended.in_progress_at, ended.finalizing_at, ended.completed_at]
    assert moments == sorted(moments, key=lambda moment: moment or 0)
    rows = rows_of(client, ended.output_file_id)
    assert [row["custom_id"] for row in rows] == [f"line-{number}" for number in range(300)]
    assert len({row["id"] for row in rows}) == 300
    for number in (0, 8, 299):
        own = client.embeddings.create(model="minilm", input=texts[number])
        answer = CreateEmbeddingResponse.model_validate(answer_of(rows[number]))
        assert np.allclose(answer.data[0].embedding, own.data[0].embedding, atol=1e-5)
        assert answer.usage == own.usage


def test_a_line_may_have_many_texts_and_all_options_of_the_endpoint(client: openai.OpenAI) -> None:
    many = [f"text {number}" for number in range(100)]
    lines = [
        embedding("many", many),
        embedding("coded", "text 1", encoding_format="base64"),
        embedding("short", "text 1", dimensions=64, user="somebody"),
    ]
    rows = rows_of(client, end_of(client, begin(client, lines)).output_file_id)
    vectors = [one["embedding"] for one in answer_of(rows[0])["data"]]
    assert len(vectors) == 100
    coded = np.frombuffer(base64.b64decode(answer_of(rows[1])["data"][0]["embedding"]), "<f4")
    assert np.allclose(coded, vectors[1], atol=1e-5)
    short = answer_of(rows[2])["data"][0]["embedding"]
    assert len(short) == 64
    assert np.linalg.norm(short) == pytest.approx(1.0, abs=1e-4)


def test_lines_may_be_jobs_of_any_model(client: openai.OpenAI) -> None:
    lines = [job(str(number), "echo", {"number": number}) for number in range(5)]
    lines.append(line("many", {"model": "echo", "inputs": [1, "two", None], "metadata": {"a": 1}}, "/v1/jobs"))
    rows = rows_of(client, end_of(client, begin(client, lines, "/v1/jobs")).output_file_id)
    assert [answer_of(row)["output"] for row in rows[:5]] == [{"number": number} for number in range(5)]
    assert answer_of(rows[5]) == {
        "object": "job",
        "model": "echo",
        "status": "succeeded",
        "outputs": [{"output": 1}, {"output": "two"}, {"output": None}],
        "metadata": {"a": 1},
        "usage": {"input_tokens": 3},
    }


def test_lines_that_fail_are_in_the_error_file_alone_with_their_reason(client: openai.OpenAI) -> None:
    lines = [
        embedding("good"),
        embedding("empty", ""),
        embedding("tokens", [1, 2, 3]),
        embedding("long", dimensions=65),
        embedding("typo", dimension=64),
        embedding("good too"),
    ]
    ended = end_of(client, begin(client, lines))
    assert ended.status == "completed"
    assert ended.request_counts is not None
    assert ended.request_counts.model_dump() == {"total": 6, "completed": 2, "failed": 4}
    assert [row["custom_id"] for row in rows_of(client, ended.output_file_id)] == ["good", "good too"]
    failed = {row["custom_id"]: row["response"] for row in rows_of(client, ended.error_file_id)}
    assert list(failed) == ["empty", "tokens", "long", "typo"]
    assert {response["status_code"] for response in failed.values()} == {422}
    errors = {name: response["body"]["error"] for name, response in failed.items()}
    assert "may be empty" in errors["empty"]["message"]
    assert "send texts" in errors["tokens"]["message"]
    assert errors["long"]["param"] == "dimensions"
    assert errors["typo"]["param"] == "dimension"


def test_a_row_that_a_job_cannot_have_is_named_by_its_place(client: openai.OpenAI) -> None:
    body = {"model": "minilm", "inputs": ["a text", 5]}
    ended = end_of(client, begin(client, [line("1", body, "/v1/jobs"), job("2", "minilm", 5)], "/v1/jobs"))
    errors = [row["response"]["body"]["error"] for row in rows_of(client, ended.error_file_id)]
    assert [error["param"] for error in errors] == ["inputs.1", "input"]


def test_a_batch_all_of_whose_lines_fail_has_errors_and_no_output(client: openai.OpenAI) -> None:
    ended = end_of(client, begin(client, [job(str(number), "picky", -1) for number in range(20)], "/v1/jobs"))
    assert ended.status == "completed"
    assert ended.output_file_id is None
    rows = rows_of(client, ended.error_file_id)
    assert [row["custom_id"] for row in rows] == [str(number) for number in range(20)]
    assert all(row["response"]["status_code"] == 502 for row in rows)
    assert "minus one cannot be served" in rows[0]["response"]["body"]["error"]["message"]


@pytest.mark.parametrize(
    ("lines", "faults"),
    [
        ([], [("empty_file", None, None)]),
        ([b"", b"  "], [("empty_file", None, None)]),
        ([embedding("1"), b"{broken"], [("invalid_json_line", 2, None)]),
        ([embedding("1"), b"[1]", b"\xff\xfe{}"], [("invalid_json_line", 2, None), ("invalid_json_line", 3, None)]),
        ([embedding("1"), embedding("2"), embedding("1")], [("duplicate_custom_id", 3, "custom_id")]),
        ([embedding("1"), job("2", "minilm", "text")], [("url_mismatch", 2, "url")]),
        ([embedding("1"), line("2", {"model": "echo", "input": "x"})], [("model_mismatch", 2, "body.model")]),
        ([line("1", {"model": "other", "input": "x"})], [("model_not_found", 1, "body.model")]),
        ([line("1", {"input": "x"})], [("missing_required_parameter", 1, "body.model")]),
        ([b'{"custom_id": "1"}'], [("missing_required_parameter", 1, "method")]),
        ([embedding("")], [("invalid_custom_id", 1, "custom_id")]),
        ([line("1", {"model": "minilm", "input": "x"}, method="GET")], [("invalid_method", 1, "method")]),
        ([line("1", [])], [("invalid_body", 1, "body")]),  # type: ignore[arg-type]  # what a caller may send
        ([embedding(str(number)) for number in range(5001)], [("too_many_lines", 5001, None)]),
    ],
)
def test_a_file_with_a_wrong_line_fails_as_a_whole_and_says_which(
    client: openai.OpenAI, lines: list[bytes], faults: list[tuple[str, int | None, str | None]]
) -> None:
    ended = end_of(client, begin(client, lines))
    assert ended.status == "failed"
    assert ended.output_file_id is None
    assert ended.errors is not None
    assert ended.errors.data is not None
    assert [(it.code, it.line, it.param) for it in ended.errors.data] == faults
    assert all(it.message for it in ended.errors.data)


@pytest.mark.parametrize("content", [gzip.compress(embedding("1")), embedding("1").decode().encode("utf-16")])
def test_a_file_that_is_no_text_fails_at_once(client: openai.OpenAI, content: bytes) -> None:
    ended = end_of(client, begin_with(client, content), timeout_s=10)
    assert ended.status == "failed"
    assert ended.errors is not None
    assert [error.code for error in ended.errors.data or []] == ["invalid_file"]


def test_of_a_file_full_of_faults_the_first_hundred_are_told(client: openai.OpenAI) -> None:
    ended = end_of(client, begin(client, [b"no json"] * 1000))
    assert ended.errors is not None
    assert ended.errors.data is not None
    assert [it.line for it in ended.errors.data] == list(range(1, 101))


def test_a_byte_order_mark_other_line_ends_and_blank_lines_are_no_faults(client: openai.OpenAI) -> None:
    large = embedding("large", "word " * 1_000_000)
    content = b"\xef\xbb\xbf" + embedding("1") + b"\r\n\r\n" + large + b"\n" + embedding("3")
    rows = rows_of(client, end_of(client, begin_with(client, content)).output_file_id)
    assert [row["custom_id"] for row in rows] == ["1", "large", "3"]


def test_a_batch_that_is_cancelled_keeps_what_has_run(client: openai.OpenAI) -> None:
    batch = begin(client, [job(str(number), "slow", 0.02) for number in range(2000)], "/v1/jobs")
    wait_until(
        lambda: (counts := client.batches.retrieve(batch.id).request_counts) is not None and counts.completed > 0,
        description="some lines have run",
    )
    cancelled = client.batches.cancel(batch.id)
    assert cancelled.status == "cancelling"
    assert cancelled.cancelling_at is not None
    ended = end_of(client, batch)
    assert ended.status == "cancelled"
    assert ended.request_counts is not None
    done, left = rows_of(client, ended.output_file_id), rows_of(client, ended.error_file_id)
    assert len(done) == ended.request_counts.completed > 0
    assert [row["custom_id"] for row in done + left] == [str(number) for number in range(2000)]
    assert {row["error"]["code"] for row in left} == {"batch_cancelled"}
    assert {row["response"] for row in left} == {None}
    with pytest.raises(openai.ConflictError, match="has ended"):
        client.batches.cancel(batch.id)


def test_a_batch_whose_time_is_over_keeps_what_has_run(batches: Batches, client: openai.OpenAI) -> None:
    batch = begin(
        client, [job(str(number), "slow", 0.02) for number in range(2000)], "/v1/jobs", completion_window="1m"
    )
    with redis.Redis.from_url(batches.broker.url) as server:
        wait_until(
            lambda: (counts := client.batches.retrieve(batch.id).request_counts) is not None and counts.completed > 0,
            description="some lines have run",
        )
        # A minute is long for a test: the io worker is told of another end when it takes the batch up again.
        batches.io.kill()
        name = f"sheaf:batch:{batch.id}"
        record = server.hget(name, "record")
        assert isinstance(record, bytes)
        shorter = record.replace(b'"expires_at":%d' % batch.expires_at, b'"expires_at":%d' % (time.time() + 12))
        assert shorter != record
        server.hset(name, "record", shorter)
        batches.io.start()
    ended = end_of(client, batch)
    assert ended.status == "expired"
    done, left = rows_of(client, ended.output_file_id), rows_of(client, ended.error_file_id)
    assert [row["custom_id"] for row in done + left] == [str(number) for number in range(2000)]
    assert {row["error"]["code"] for row in left} == {"batch_expired"}


def test_faults_of_a_query_are_told_in_the_words_of_the_client(client: openai.OpenAI) -> None:
    for path, param in (
        ("/batches?limit=0", "limit"),
        ("/batches?after=batch_unknown", "after"),
        ("/files?order=up", "order"),
    ):
        with pytest.raises(openai.UnprocessableEntityError) as refused:
            client.get(path, cast_to=object)
        assert refused.value.param == param
        assert refused.value.code == "invalid-request"


def test_batches_are_listed_newest_first_page_by_page(client: openai.OpenAI) -> None:
    made = [end_of(client, begin(client, [embedding("1")])).id for _ in range(5)]
    assert [batch.id for batch in client.batches.list(limit=2)] == made[::-1]
    page = client.batches.list(limit=2)
    assert page.has_more
    assert [batch.id for batch in page.data] == made[:2:-1]
    assert [batch.id for batch in client.batches.list(after=made[2]).data] == made[1::-1]


def test_another_owners_batches_and_files_do_not_exist(batches: Batches, client: openai.OpenAI) -> None:
    ended = end_of(client, begin(client, [embedding("1")]))
    with batches.client("stranger") as stranger:
        for ask in (stranger.batches.retrieve, stranger.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(ended.id)
        assert stranger.batches.list().data == []
        with pytest.raises(openai.UnprocessableEntityError, match="there is no file"):
            stranger.batches.create(
                input_file_id=ended.input_file_id, endpoint="/v1/embeddings", completion_window="24h"
            )
    with batches.client("boss", "--scopes", "admin") as boss:
        assert boss.batches.retrieve(ended.id).id == ended.id


def test_a_wrong_request_is_refused_with_what_to_do(client: openai.OpenAI) -> None:
    file_id = end_of(client, begin(client, [embedding("1")])).input_file_id
    good = {"input_file_id": file_id, "endpoint": "/v1/embeddings", "completion_window": "24h"}
    cases: list[tuple[dict[str, object], str]] = [
        ({"input_file_id": "file-" + "0" * 32}, "input_file_id"),
        ({"input_file_id": "../../etc/passwd"}, "input_file_id"),
        ({"endpoint": "/v1/chat/completions"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "3d"}, "completion_window"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"endpont": "/v1/embeddings"}, "endpont"),
    ]
    for change, param in cases:
        with pytest.raises(openai.UnprocessableEntityError) as refused:
            client.post("/batches", body=good | change, cast_to=object)
        assert refused.value.param == param, change


def test_an_output_is_no_input(client: openai.OpenAI) -> None:
    ended = end_of(client, begin(client, [embedding("1")]))
    assert ended.output_file_id is not None
    with pytest.raises(openai.UnprocessableEntityError, match="purpose"):
        client.batches.create(input_file_id=ended.output_file_id, endpoint="/v1/embeddings", completion_window="24h")


def test_the_same_idempotency_key_is_the_same_batch(client: openai.OpenAI) -> None:
    file = end_of(client, begin(client, [embedding("1")])).input_file_id
    same = {"input_file_id": file, "endpoint": "/v1/embeddings", "completion_window": "24h"}
    headers = {"Idempotency-Key": "once"}
    first, second = (client.batches.create(**same, extra_headers=headers) for _ in range(2))
    assert first.id == second.id
    with pytest.raises(openai.UnprocessableEntityError, match="idempotency"):
        client.batches.create(**(same | {"completion_window": "1h"}), extra_headers=headers)


def test_an_owner_has_so_many_open_batches_and_no_more(client: openai.OpenAI) -> None:
    lines = [job(str(number), "slow", 0.2) for number in range(100)]
    made = [begin(client, lines, "/v1/jobs") for _ in range(3)]
    with pytest.raises(openai.RateLimitError, match="have not ended"):
        begin(client, lines, "/v1/jobs")
    for batch in made:
        client.batches.cancel(batch.id)
    for batch in made:
        end_of(client, batch)
    assert end_of(client, begin(client, [embedding("1")])).status == "completed"


def test_a_key_that_may_not_submit_with_low_priority_makes_no_batches(batches: Batches) -> None:
    with (
        batches.client("high", "--priorities", "high") as client,
        pytest.raises(openai.PermissionDeniedError, match="priority"),
    ):
        begin(client, [embedding("1")])


def test_a_file_is_there_for_as_long_as_a_batch_reads_it(client: openai.OpenAI) -> None:
    content = b"\n".join(job(str(number), "slow", 0.1) for number in range(2000))
    expires: Any = {"anchor": "created_at", "seconds": 3600}
    file = client.files.create(file=("requests.jsonl", content), purpose="batch", expires_after=expires)
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/jobs", completion_window="24h")
    with pytest.raises(openai.ConflictError, match=f"{batch.id} reads it, and is "):
        client.files.delete(file.id)
    expires_at = client.files.retrieve(file.id).expires_at
    assert expires_at is not None
    assert batch.expires_at is not None
    assert expires_at > batch.expires_at
    client.batches.cancel(batch.id)
    end_of(client, batch)
    assert client.files.delete(file.id).deleted


async def test_a_batch_whose_file_the_broker_has_lost_fails_with_the_reason(
    batches: Batches, client: openai.OpenAI
) -> None:
    batch = begin(client, [job(str(number), "slow", 0.1) for number in range(2000)], "/v1/jobs")
    async with open_broker(load_settings(batches.config, {}).settings) as broker:
        while not (paused := await broker.batches.pause(batch.id)) or not paused.rests:
            await asyncio.sleep(0.1)
        await broker.files.remove(batch.input_file_id)
        (batches.folder / "files" / batch.input_file_id).unlink()
        await broker.batches.resume(batch.id)
    ended = await asyncio.to_thread(end_of, client, batch)
    assert ended.status == "failed"
    assert ended.errors is not None
    assert ended.errors.data is not None
    assert ended.errors.data[0].code == "file_not_found"


def test_a_batch_is_a_celery_task_with_a_result(batches: Batches, client: openai.OpenAI) -> None:
    ended = end_of(client, begin(client, [embedding("1")]))
    app = make_app(load_settings(batches.config, {}).settings)
    result: AsyncResult[object] = AsyncResult(ended.id, app=app)
    wait_until(result.successful, description="its result is there")
    assert result.result == {
        "batch_id": ended.id,
        "status": "completed",
        "output_file_id": ended.output_file_id,
        "error_file_id": None,
    }
    inspected = app.control.inspect(timeout=5).registered()
    assert any("sheaf.batches" in tasks for tasks in (inspected or {}).values())


def test_flower_sees_a_batch_as_a_task(batches: Batches, client: openai.OpenAI) -> None:
    app = make_app(load_settings(batches.config, {}).settings)
    with collected_events(app) as events:
        wait_until(lambda: events, description="events are received")
        good = end_of(client, begin(client, [embedding("1")]))
        bad = end_of(client, begin(client, [b"no json"]))
        for batch, end in ((good, "task-succeeded"), (bad, "task-failed")):
            expected = ["task-received", "task-started", end]
            wait_until(
                lambda batch=batch, expected=expected: of_task(events, batch.id) == expected,  # type: ignore[misc]  # bound now
                description=f"{expected}, but got {of_task(events, batch.id)}",
            )
    received = next(event for event in events if event["type"] == "task-received" and event["uuid"] == good.id)
    assert (received["name"], received["kwargs"]) == ("sheaf.batches", f"{{'batch_id': '{good.id}'}}")
    assert str(received["hostname"]).startswith("sheaf-io@")
    succeeded = next(event for event in events if event["type"] == "task-succeeded" and event["uuid"] == good.id)
    assert "'status': 'completed'" in str(succeeded["result"])


def test_celerys_revoke_cancels_a_batch(batches: Batches, client: openai.OpenAI) -> None:
    app = make_app(load_settings(batches.config, {}).settings)
    batch = begin(client, [job(str(number), "slow", 0.2) for number in range(200)], "/v1/jobs")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress", description="it has begun")
    app.control.revoke(batch.id)
    ended = end_of(client, batch)
    assert (ended.status, ended.request_counts and ended.request_counts.total) == ("cancelled", 200)


def test_the_row_of_a_batch_is_no_job_that_anybody_lists(batches: Batches, client: openai.OpenAI) -> None:
    end_of(client, begin(client, [embedding(str(number)) for number in range(10)]))
    answer = httpx.get(f"{batches.base}/v1/jobs", headers={"authorization": f"Bearer {client.api_key}"})
    assert answer.json()["data"] == []
