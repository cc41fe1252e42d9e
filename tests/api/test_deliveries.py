"""What callers and operators see of deliveries that wait: a real API, a real courier, a receiver that fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from api.schemas import DeliveryList
from broker.deliveries import Deliveries
from tests.api.front import Front, front
from tests.conftest import wait_until
from tests.receiver import Receiver
from tests.workers.post import Post
from webhooks import new_secret
from workers.courier.pause import Reason


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Front, Post]]:
    """An API, and what a courier of its broker needs."""
    with (
        front(tmp_path_factory.mktemp("office"), webhooks={"allow": ["127.0.0.1"]}) as made,
        Receiver() as receiver,
        Deliveries(made.broker.url, new_secret=new_secret) as log,
    ):
        post = Post(made.broker.url, receiver, log)
        yield made, post
        post.client.close()


def test_a_delivery_that_is_put_off_says_until_when_and_why(office: tuple[Front, Post]) -> None:
    made, post = office
    url = post.receiver.answer("/ill", 500)
    with made.client() as client, post.courier(breaker_failures=1, breaker_open_s=200, retry_schedule_s=(0, 1)):

        def ended() -> str:
            body = {"model": "echo", "input": 1, "webhook": {"url": url}}
            job_id: str = client.post("/v1/jobs", json=body).raise_for_status().json()["id"]
            assert client.post(f"/v1/jobs/{job_id}/cancel").status_code == 200
            return job_id

        tried = ended()
        wait_until(lambda: deliveries(client, tried)[0]["put_off"], description="it was tried, and its retry put off")
        untried = ended()
        wait_until(lambda: deliveries(client, untried)[0]["put_off"], description="the next one is put off at once")
        for job_id, attempts in ((tried, 1), (untried, 0)):
            [delivery] = deliveries(client, job_id)
            assert (delivery["state"], len(delivery["attempts"])) == ("pending", attempts)
            assert delivery["put_off"] == Reason.FAILING
            due = datetime.fromisoformat(delivery["next_attempt_at"])
            assert timedelta(seconds=60) < due - datetime.now(UTC) <= timedelta(seconds=260)
            shown = json.loads(made.sheaf("webhooks", "show", delivery["id"], "--json"))
            assert (shown["job_id"], shown["put_off"]) == (job_id, Reason.FAILING)
            assert shown["next_attempt_at"][:19] == delivery["next_attempt_at"][:19]
            assert f"put_off: {Reason.FAILING}" in made.sheaf("webhooks", "show", delivery["id"])
        assert f"put off until {due:%Y-%m-%d}" in made.sheaf("webhooks", "list", "--job", tried)


def test_a_delivery_that_nothing_holds_up_says_nothing_of_it(office: tuple[Front, Post]) -> None:
    made, post = office
    body = {"model": "echo", "input": 1, "webhook": {"url": post.receiver.url()}}
    with made.client() as client:
        job_id: str = client.post("/v1/jobs", json=body).raise_for_status().json()["id"]
        client.post(f"/v1/jobs/{job_id}/cancel")
        [queued] = deliveries(client, job_id)
        assert (queued["state"], queued["next_attempt_at"], queued["put_off"]) == ("pending", None, None)
        with post.courier():
            wait_until(lambda: deliveries(client, job_id)[0]["state"] == "delivered", description="it is delivered")
        [delivered] = deliveries(client, job_id)
        assert (delivered["next_attempt_at"], delivered["put_off"]) == (None, None)


def deliveries(client: httpx.Client, job_id: str) -> list[dict[str, Any]]:
    answer = client.get(f"/v1/jobs/{job_id}/deliveries").raise_for_status()
    DeliveryList.model_validate_json(answer.content)
    found: list[dict[str, Any]] = answer.json()["data"]
    return found
