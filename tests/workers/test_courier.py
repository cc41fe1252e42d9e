"""The courier on a real server, calling real receivers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import redis
from prometheus_client import CollectorRegistry

from broker import Broker, JobEvent, Priority
from broker.deliveries import Deliveries, Delivery, DeliveryState
from broker.message import WEBHOOKS
from broker.results import Failure, RunFacts, encode_failure, encode_record, encode_success
from broker.webhooks import Notification
from configs.webhooks import WebhookSettings
from telemetry.metrics import CourierMetrics
from tests.broker.conftest import new_job
from tests.conftest import free_port, wait_until
from tests.receiver import Receiver, Reply
from webhooks import new_secret
from workers.courier import NO_LIMIT, Courier

DEFAULTS = {"allow": ["127.0.0.1"], "retry_schedule_s": [0, 0.05, 0.05], "timeout_s": 5, "breaker_failures": 50}


class Post:
    """One server with a courier on it, its log of deliveries, and a receiver."""

    def __init__(self, url: str, receiver: Receiver, log: Deliveries) -> None:
        self.url = url
        self.receiver = receiver
        self.log = log
        self.client = redis.Redis.from_url(url)
        self.registry = CollectorRegistry()

    @contextmanager
    def courier(self, *, public_url: str = "", **settings: object) -> Iterator[Courier]:
        broker = Broker(self.url, uuid.uuid4().hex, max_attempts=NO_LIMIT, lease_s=5)
        deliveries = Deliveries(self.url, new_secret=new_secret)
        self.registry = CollectorRegistry()
        checked = WebhookSettings.model_validate(DEFAULTS | settings)
        courier = Courier(broker, deliveries, checked, CourierMetrics(self.registry), public_url=public_url)
        courier.start()
        try:
            yield courier
        finally:
            courier.stop(5)

    def tell(self, url: str | None = None, *, event: JobEvent = JobEvent.SUCCEEDED, job_id: str = "") -> Notification:
        """Queue an event, as the end of a job does."""
        job_id = job_id or str(uuid.uuid4())
        told = Notification(event, job_id, "echo", url or self.receiver.url(), "me", "r-1", time.time())
        self.client.lpush(WEBHOOKS, told.encode())
        return told

    def delivery(self, told: Notification) -> Delivery | None:
        return self.log.get(told.id)

    def over(self, *told: Notification) -> list[Delivery]:
        """The deliveries of these events, once they are delivered or have failed."""

        def all_over() -> bool:
            found = [self.delivery(one) for one in told]
            return all(one is not None and one.state is not DeliveryState.PENDING for one in found)

        wait_until(all_over, description="the deliveries are over")
        return [one for event in told if (one := self.delivery(event)) is not None]

    def secret(self) -> str:
        return self.log.secrets.of(["me"])[0].current

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
def post(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Post]:
    # A stop waits for the waiter.
    monkeypatch.setattr("workers.courier.courier.WAIT_S", 0.05)
    with Receiver() as receiver, Deliveries(valkey_url, new_secret=new_secret) as log:
        made = Post(valkey_url, receiver, log)
        yield made
        made.client.close()


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
    assert delivery.attempts[0].error == "it answered 500: out of order"
    assert second.verified(post.secret())


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
    assert "Connect call failed" in (delivery.attempts[0].error or "")


def test_an_address_inside_is_not_connected_to(post: Post) -> None:
    with post.courier(allow=(), allow_http=True):
        [delivery] = post.over(post.tell(f"http://localhost:{post.receiver.port}/hook"))
        [literal] = post.over(post.tell())
    assert "is not public" in (delivery.attempts[0].error or "")
    assert "the URL is refused" in (literal.attempts[0].error or "")
    assert post.receiver.calls() == []


def test_hosts_that_hang_delay_no_other_host(post: Post) -> None:
    """cog#2229, seen from the queue: a dead receiver holds nobody else's slot."""
    with Receiver() as dead:
        hanging = dead.answer("/hangs", Reply(hang=True))
        with post.courier(max_per_host=4, max_in_flight=128) as courier:
            for _ in range(300):
                post.tell(hanging)
            begin = time.monotonic()
            post.over(*(post.tell() for _ in range(20)))
            assert time.monotonic() - begin < 3
            assert len(dead.calls("/hangs")) == 4
            courier.hurry()
    assert post.client.llen(WEBHOOKS) + waiting(post) == 300


def waiting(post: Post) -> int:
    """Messages that were given back or put off."""
    return int(post.client.llen(f"sheaf:returned:{WEBHOOKS}:0")) + int(post.client.zcard(f"sheaf:delayed:{WEBHOOKS}"))


def test_many_deliveries_to_one_host_are_made_a_few_at_a_time(post: Post) -> None:
    told = [post.tell() for _ in range(60)]
    with post.courier(max_per_host=4):
        deliveries = post.over(*told)
    assert all(len(delivery.attempts) == 1 for delivery in deliveries)
    assert len(post.receiver.calls()) == 60


def test_a_host_that_fails_in_a_row_is_left_alone_until_a_probe_succeeds(post: Post) -> None:
    url = post.receiver.answer("/ill", 500)
    told = [post.tell(url) for _ in range(3)]
    with post.courier(breaker_failures=3, breaker_open_s=1, retry_schedule_s=(0,) * 9):
        wait_until(lambda: post.metric("sheaf_webhook_breakers_open") == 1, description="its breaker opens")
        before = len(post.receiver.calls("/ill"))
        more = [post.tell(url) for _ in range(20)]
        wait_until(lambda: waiting(post) >= 20, description="what came is put off")
        assert len(post.receiver.calls("/ill")) <= before + 1
        assert [post.delivery(one) for one in more].count(None) >= 19
        post.receiver.answer("/ill", 200)
        deliveries = post.over(*told, *more)
        wait_until(lambda: post.metric("sheaf_webhook_breakers_open") == 0, description="its breaker closes")
    assert {delivery.state for delivery in deliveries} == {DeliveryState.DELIVERED}


def test_what_is_put_off_for_longer_than_all_its_attempts_would_take_has_failed(post: Post) -> None:
    url = post.receiver.answer("/ill", 500)
    with post.courier(breaker_failures=1, breaker_open_s=600, retry_schedule_s=(0,)):
        post.over(post.tell(url))
        old = replace(post.tell(url), job_id="old", at=time.time() - 7200)
        post.client.lpush(WEBHOOKS, old.encode())
        [delivery] = post.over(old)
    assert delivery.attempts[0].error == "not called any more: its host failed all the time"
    assert len(post.receiver.calls("/ill")) == 1


def test_a_message_that_is_none_of_ours_is_dropped(post: Post) -> None:
    post.client.lpush(WEBHOOKS, b"no JSON", b'{"event":"job.succeeded"}', b'{"event":"job.lost"}')
    with post.courier():
        post.over(post.tell())
        wait_until(lambda: not post.client.keys(f"sheaf:held:{WEBHOOKS}:*"), description="nothing is held")


def test_a_stopped_courier_lets_a_call_end_and_gives_back_what_has_not_begun(post: Post) -> None:
    url = post.receiver.answer("/slow", Reply(hang=True))
    with post.courier(max_per_host=1) as courier:
        for _ in range(3):
            post.tell(url)
        wait_until(lambda: post.receiver.calls("/slow"), description="one is called")
        courier.hurry()
    assert waiting(post) + int(post.client.llen(WEBHOOKS)) == 3
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
