"""The courier on a real server, calling real receivers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace

import orjson
import pytest

from broker import JobEvent, Priority
from broker.deliveries import DeliveryState
from broker.message import WEBHOOKS
from broker.results import Failure, RunFacts, encode_failure, encode_record, encode_success
from broker.webhooks import Notification
from tests.broker.conftest import new_job
from tests.conftest import free_port, wait_until
from tests.receiver import Reply
from tests.workers.post import Post
from workers.courier.failures import NoAnswer


def test_a_call_is_signed_and_says_who_calls(post: Post) -> None:
    with post.courier():
        [delivery] = post.over(post.tell())
    [call] = post.receiver.calls()
    assert call.verified(post.secret())["type"] == "job.succeeded"
    assert call.id == delivery.id
    assert call.headers["content-type"] == "application/json"
    assert call.headers["user-agent"].startswith("Sheaf-Webhooks/")
    assert abs(int(call.headers["webhook-timestamp"]) - time.time()) < 10
    assert (delivery.state, [attempt.status for attempt in delivery.attempts]) == (DeliveryState.DELIVERED, [200])
    assert post.metric("sheaf_webhook_deliveries_total", outcome="delivered") == 1


def test_after_a_rotation_both_secrets_verify(post: Post) -> None:
    before = post.secret()
    after = post.log.secrets.rotate("me").current
    with post.courier():
        post.over(post.tell())
    [call] = post.receiver.calls()
    assert call.verified(before) == call.verified(after)
    assert len(call.headers["webhook-signature"].split()) == 2


def test_a_failed_call_is_made_again_under_the_same_id_with_the_same_body(post: Post) -> None:
    url = post.receiver.answer("/shaky", Reply(500, body=b"out of\norder"), 200)
    with post.courier():
        [delivery] = post.over(post.tell(url))
    first, second = post.receiver.calls("/shaky")
    assert (first.id, first.body) == (second.id, second.body)
    assert [attempt.status for attempt in delivery.attempts] == [500, 200]
    assert (delivery.attempts[0].error, delivery.attempts[0].detail) == ("it answered 500", "out of order")
    assert second.verified(post.secret())


def test_a_kept_connection_that_was_closed_costs_no_attempt(post: Post) -> None:
    """A receiver may end idle connections, and does in the very moment in which one is used."""
    url = post.receiver.answer("/closes", 200, Reply(raw=b""), 200)
    with post.courier(breaker_failures=1):
        [_] = post.over(post.tell(url))
        [delivery] = post.over(post.tell(url))
    assert [attempt.status for attempt in delivery.attempts] == [200]
    _, failed, made_again = post.receiver.calls("/closes")
    assert (failed.id, failed.body) == (made_again.id, made_again.body)
    assert made_again.verified(post.secret())
    assert post.metric("sheaf_webhook_breakers_open") == 0


def test_after_the_last_attempt_it_has_failed_and_can_be_sent_again(post: Post) -> None:
    url = post.receiver.answer("/down", 503, 404, 500, 200)
    told = post.tell(url)
    with post.courier():
        [failed] = post.over(told)
        assert (failed.state, len(failed.attempts)) == (DeliveryState.FAILED, 3)
        assert post.log.resend(told.id, 60) is not None
        [delivered] = post.over(told)
    assert (delivered.state, delivered.tries, len(delivered.attempts)) == (DeliveryState.DELIVERED, 1, 4)
    assert len({(call.id, call.body) for call in post.receiver.calls("/down")}) == 1
    assert post.metric("sheaf_webhook_deliveries_total", outcome="failed") == 1


def test_what_is_sent_again_is_not_sent_by_its_earlier_round_too(post: Post) -> None:
    url = post.receiver.answer("/again", 500, 200)
    told = post.tell(url)
    with post.courier(retry_schedule_s=(0, 1)):
        wait_until(lambda: post.delivery(told) is not None, description="it was tried once")
        post.log.resend(told.id, 60)
        post.over(told)
        wait_until(lambda: post.client.zcard(f"sheaf:delayed:{WEBHOOKS}") == 0, description="the retry became due")
        wait_until(lambda: not post.client.keys(f"sheaf:held:{WEBHOOKS}:*"), description="it was dropped")
    assert len(post.receiver.calls("/again")) == 2


def test_a_redirect_is_a_failure_and_nobody_goes_there(post: Post) -> None:
    """gradient#40: a redirect to the metadata service is as good as its address."""
    for place in (post.receiver.url("/inside"), "http://169.254.169.254/latest/meta-data"):
        url = post.receiver.answer("/redirects", Reply(307, {"location": place}))
        with post.courier():
            [delivery] = post.over(post.tell(url))
        assert delivery.attempts[-1].error == "it answered 307: redirects are not followed, name the final address"
    assert post.receiver.calls("/inside") == []


def test_a_receiver_that_is_gone_is_not_called_again(post: Post) -> None:
    with post.courier():
        [delivery] = post.over(post.tell(post.receiver.answer("/gone", 410)))
    assert (delivery.state, len(delivery.attempts)) == (DeliveryState.FAILED, 1)


@pytest.mark.parametrize("status", [429, 503])
def test_a_receiver_is_called_no_sooner_than_it_asked_for(post: Post, status: int) -> None:
    url = post.receiver.answer("/busy", Reply(status, {"retry-after": "1"}), 200)
    with post.courier():
        post.over(post.tell(url))
    first, second = post.receiver.calls("/busy")
    assert 0.9 <= second.at - first.at < 5


@pytest.mark.parametrize(
    "date", ["Mon, 01 Jan 99999999999999999999 00:00:00 GMT", "Mon, 01 Jan 2020 00:00:00 +9999999999999", "soon", ""]
)
def test_a_moment_that_is_none_changes_nothing(post: Post, date: str) -> None:
    url = post.receiver.answer("/odd", Reply(503, {"retry-after": date}), 200)
    with post.courier():
        [delivery] = post.over(post.tell(url))
    assert (delivery.state, [attempt.status for attempt in delivery.attempts]) == (DeliveryState.DELIVERED, [503, 200])


def test_a_receiver_that_does_not_answer_is_given_up(post: Post) -> None:
    with post.courier(timeout_s=0.2, retry_schedule_s=(0,)):
        [delivery] = post.over(post.tell(post.receiver.answer("/mute", Reply(hang=True))))
    assert delivery.attempts[0].error == "no answer within 0.2 s"
    assert delivery.attempts[0].duration_ms < 2000


def test_an_endless_answer_is_not_read_to_its_end(post: Post) -> None:
    url = post.receiver.answer("/long", Reply(200, body=b"x" * 5_000_000))
    with post.courier():
        [delivery] = post.over(post.tell(url))
    assert delivery.state is DeliveryState.DELIVERED


def test_a_receiver_that_is_not_there_is_told_of(post: Post) -> None:
    with post.courier():
        [delivery] = post.over(post.tell(f"http://127.0.0.1:{free_port()}/"))
    assert delivery.state is DeliveryState.FAILED
    assert delivery.attempts[0].status is None
    assert delivery.attempts[0].error == NoAnswer.REFUSED
    assert "Connect call failed" in (delivery.attempts[0].detail or "")


def test_an_address_inside_is_not_connected_to(post: Post) -> None:
    with post.courier(allow=(), allow_http=True):
        [delivery] = post.over(post.tell(f"http://localhost:{post.receiver.port}/hook"))
        [literal] = post.over(post.tell())
    assert delivery.attempts[0].error == NoAnswer.NOT_ALLOWED
    assert "is not public" in (delivery.attempts[0].detail or "")
    assert "the URL is refused" in (literal.attempts[0].error or "")
    assert post.receiver.calls() == []


def test_a_message_that_is_none_of_ours_is_dropped(post: Post) -> None:
    good = Notification(JobEvent.SUCCEEDED, "job-1", "echo", post.receiver.url("/odd"), "me", None, time.time())
    odd: dict[str, object] = {"url": 5, "owner": [], "at": "now", "asked_at": {}, "round": "1"}
    damaged = [orjson.dumps(asdict(good) | {field: value}) for field, value in odd.items()]
    post.client.lpush(WEBHOOKS, b"no JSON", b'{"event":"job.succeeded"}', b'{"event":"job.lost"}', *damaged)
    with post.courier():
        post.over(post.tell())
        wait_until(lambda: not post.client.keys(f"sheaf:held:{WEBHOOKS}:*"), description="nothing is held")
    assert post.receiver.calls("/odd") == []


def test_a_stopped_courier_lets_a_call_end_and_gives_back_what_has_not_begun(post: Post) -> None:
    url = post.receiver.answer("/slow", Reply(hang=True))
    with post.courier(max_per_host=1) as courier:
        for _ in range(3):
            post.tell(url)
        wait_until(lambda: post.receiver.calls("/slow"), description="one is called")
        courier.hurry()
    assert post.put_aside() + int(post.client.llen(WEBHOOKS)) == 3
    assert not post.client.keys(f"sheaf:held:{WEBHOOKS}:*")


def test_messages_that_come_to_an_idle_courier_are_called_at_once(post: Post) -> None:
    with post.courier():
        post.over(post.tell())
        took: list[float] = []
        for _ in range(5):
            begin, told = time.time(), post.tell()
            [delivery] = post.over(told)
            took.append(delivery.attempts[0].at - begin)
    assert sorted(took)[2] < 0.2


def test_however_often_its_courier_was_lost_a_delivery_is_made_beside_others(post: Post) -> None:
    lost = Notification(JobEvent.FAILED, "lost", "echo", post.receiver.url("/lost"), "me", None, time.time())
    held = f"sheaf:held:{WEBHOOKS}:dead"
    post.client.hset(
        held, mapping={str(tag): b"1:9:" + replace(lost, job_id=f"lost-{tag}").encode() for tag in range(5)}
    )
    post.client.zadd(f"sheaf:holders:{WEBHOOKS}", {"dead": 1})
    hanging = post.receiver.answer("/hangs", Reply(hang=True))
    with post.courier() as courier:
        post.tell(hanging)
        wait_until(lambda: len(post.receiver.calls("/lost")) == 5, description="what was held by the dead is called")
        courier.hurry()
    assert post.client.llen(f"sheaf:dead:{WEBHOOKS}") == 0


Store = Callable[..., str]


@pytest.fixture
def stored(post: Post) -> Store:
    """Stores a job with its end; returns its id."""

    def store(
        output: object = None, *, many: bool = False, failure: Failure | None = None, metadata: bytes = b"{}"
    ) -> str:
        job = new_job(many=many, metadata=metadata, created_at=1_700_000_000.0)
        facts = RunFacts("echo", "1", int(Priority.NORMAL), 1, many, 1.0, 1_700_000_001.0, 1_700_000_002.5, None)
        end = encode_success(job.id, output, facts) if failure is None else encode_failure(job.id, failure, facts)
        post.client.set(f"sheaf:job:{job.id}", encode_record(job), ex=60)
        post.client.set(f"celery-task-meta-{job.id}", end, ex=60)
        return job.id

    return store


def test_a_payload_has_the_jobs_own_fields_and_its_output(post: Post, stored: Store) -> None:
    job_id = stored([1.5, 2.0], metadata=b'{"order":7}')
    with post.courier(public_url="https://sheaf.example"):
        post.over(told := post.tell(job_id=job_id))
    [call] = post.receiver.calls()
    url = f"https://sheaf.example/v1/jobs/{job_id}"
    assert call.content["data"] == {
        "id": job_id, "object": "job", "model": "echo", "version": "1", "status": "succeeded", "attempt": 1,
        "created_at": "2023-11-14T22:13:20.000Z", "started_at": "2023-11-14T22:13:21.000Z",
        "finished_at": "2023-11-14T22:13:22.500Z", "error": None, "metadata": {"order": 7}, "output": [1.5, 2.0],
        "urls": {"self": url, "deliveries": f"{url}/deliveries"},
    }  # fmt: skip
    assert call.content["timestamp"][:10] == time.strftime("%Y-%m-%d", time.gmtime(told.at))


def test_a_payload_stays_small_whatever_the_job_holds(post: Post, stored: Store) -> None:
    large = "x" * 20_000
    with post.courier():
        for path, job_id in (
            ("/output", stored(large)),
            ("/rows", stored([{"output": 1}], many=True)),
            ("/metadata", stored("short", metadata=b'{"note":"%s"}' % large.encode())),
            ("/error", stored(failure=Failure("ValueError", large))),
        ):
            event = JobEvent.FAILED if path == "/error" else JobEvent.SUCCEEDED
            post.over(post.tell(post.receiver.url(path), job_id=job_id, event=event))
    sent = {
        call.path: call for path in ("/output", "/rows", "/metadata", "/error") for call in post.receiver.calls(path)
    }
    assert all(len(call.body) < 20_000 for call in sent.values())
    data = {path: call.content["data"] for path, call in sent.items()}
    assert data["/output"]["output_omitted"]
    assert "output" not in data["/output"]
    assert data["/rows"]["outputs"] == [{"output": 1}]
    assert data["/metadata"]["metadata_omitted"]
    assert data["/metadata"]["output"] == "short"
    assert data["/error"]["error"]["type"] == "ValueError"
    assert len(data["/error"]["error"]["message"]) == 2000
    assert "output_omitted" not in data["/error"]


def test_a_job_that_is_not_kept_any_more_is_told_of_all_the_same(post: Post) -> None:
    with post.courier():
        post.over(post.tell(job_id="gone", event=JobEvent.EXPIRED))
    [call] = post.receiver.calls()
    data = call.content["data"]
    assert (data["id"], data["status"], data["output_omitted"]) == ("gone", "expired", True)
