"""A courier on a real server, with a receiver to call."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import redis
from prometheus_client import CollectorRegistry

from broker import Broker, JobEvent
from broker.deliveries import Deliveries, Delivery, DeliveryState
from broker.message import WEBHOOKS
from broker.webhooks import Notification
from configs.webhooks import WebhookSettings
from telemetry.metrics import CourierMetrics
from tests.conftest import wait_until
from tests.receiver import Receiver
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

    def tell(
        self,
        url: str | None = None,
        *,
        event: JobEvent = JobEvent.SUCCEEDED,
        job_id: str = "",
        owner: str = "me",
    ) -> Notification:
        """Queue an event, as the end of a job does."""
        job_id = job_id or str(uuid.uuid4())
        told = Notification(event, job_id, "echo", url or self.receiver.url(), owner, "r-1", time.time())
        self.client.lpush(WEBHOOKS, told.encode())
        return told

    def delivery(self, told: Notification) -> Delivery | None:
        return self.log.get(told.id)

    def attempts(self, told: Notification) -> int:
        """How often it was called."""
        delivery = self.delivery(told)
        return 0 if delivery is None else len(delivery.attempts)

    def reason(self, told: Notification) -> str | None:
        """Why its delivery is put off; None when it is not."""
        delivery = self.delivery(told)
        return None if delivery is None or delivery.put_off is None else delivery.put_off.reason

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

    def put_aside(self) -> int:
        """Messages that were given back or put off."""
        given_back = int(self.client.llen(f"sheaf:returned:{WEBHOOKS}:0"))
        return given_back + int(self.client.zcard(f"sheaf:delayed:{WEBHOOKS}"))

    def in_flight(self) -> float:
        return self.metric("sheaf_webhooks_in_flight")
