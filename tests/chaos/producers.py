"""Those who submit jobs, over HTTP and with Celery, as careful clients do: what was not acknowledged is sent again."""

from __future__ import annotations

import json
import random
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping

import httpx
from celery import Celery

from tests.chaos.handlers import MarkedRow
from tests.chaos.ledger import Expectation, Ledger, Outcome, Producer, Sent

#: Shares of the queues among jobs.
QUEUES: Mapping[str, int] = {"echo": 5, "quick": 4, "slow": 1}
#: Seconds that a row sleeps on the device, at most.
LONGEST_SLEEP_S: Mapping[str, float] = {"echo": 0.0, "quick": 0.02, "slow": 0.06}
#: One row in so many raises; never in `echo`, which has no such rows.
FAILS_EVERY = 40
#: One Celery call in so many names another task, which belongs to the dead letters.
MISADDRESSED_EVERY = 100
#: Which calls of the first Celery producer hold a row that kills its worker: one in so many, from this one on.
KILLS_EVERY, KILLS_FIRST = 1000, 150
#: One Celery call in so many is delayed, by so many seconds at most.
DELAYED_EVERY = 20
LONGEST_DELAY_S = 3.0
MOST_ROWS = 10
#: Seconds for which an HTTP caller waits for its answer; shorter than some freezes.
HTTP_PATIENCE_S = 2.5
#: Seconds between repeats.
REPEAT_S = 0.1
#: Seconds for which a submit is repeated after the run has ended; everything works again by then.
LAST_REPEATS_S = 30.0


class _Pace:
    """Lets a producer go on so many times a second, at random moments, until the run ends."""

    def __init__(self, rate: float, choice: random.Random, stopping: threading.Event) -> None:
        self._rate = rate
        self._choice = choice
        self._stopping = stopping

    def go_on(self) -> bool:
        """False when the run has ended."""
        return not self._stopping.wait(self._choice.expovariate(self._rate))


class ChaosProducer(ABC):
    """Submits until `stopping`, then ends when its last submit was answered."""

    def __init__(self, name: str, seed: int, rate: float, ledger: Ledger, stopping: threading.Event) -> None:
        self.choice = random.Random(f"{seed} {name}")
        self.ledger = ledger
        self.stopping = stopping
        self._pace = _Pace(rate, random.Random(f"{seed} {name} pace"), stopping)

    def run(self) -> None:
        while self._pace.go_on():
            self.submit()

    @abstractmethod
    def submit(self) -> None:
        """Submit one job and note it."""

    def queue(self) -> str:
        return self.choice.choices(list(QUEUES), list(QUEUES.values()))[0]

    def row(self, queue: str) -> MarkedRow:
        fails = queue != "echo" and self.choice.randrange(FAILS_EVERY) == 0
        return MarkedRow(
            mark=self.unique(), sleep_s=self.choice.uniform(0, LONGEST_SLEEP_S[queue]), fails=fails, kills=False
        )

    def unique(self) -> str:
        return str(uuid.UUID(int=self.choice.getrandbits(128), version=4))


def output_of(queue: str, row: MarkedRow) -> object:
    """What the model of `queue` answers to a row that does not fail."""
    return row if queue == "echo" else row["mark"]


def expectation_of(queue: str, row: MarkedRow) -> Expectation:
    """How a job of this one row has to end."""
    if row["kills"]:
        return Expectation(Outcome.DEAD, "its worker was lost")
    if row["fails"]:
        return Expectation(Outcome.FAILS, row["mark"])
    return Expectation(Outcome.SUCCEEDS, output_of(queue, row))


class HttpProducer(ChaosProducer):
    """Repeats a submit under its `Idempotency-Key`, byte for byte, until the API has accepted it."""

    def __init__(
        self, kind: Producer, url: str, seed: int, rate: float, ledger: Ledger, stopping: threading.Event
    ) -> None:
        super().__init__(kind, seed, rate, ledger, stopping)
        self._kind = kind
        self._client = httpx.Client(base_url=url, timeout=HTTP_PATIENCE_S)

    def run(self) -> None:
        with self._client:
            super().run()

    def submit(self) -> None:
        queue = self.queue()
        body: dict[str, object] = {"model": queue, "priority": self.choice.choice(["high", "normal", "low"])}
        if self._kind is Producer.HTTP_MANY:
            rows = [self.row(queue) for _ in range(self.choice.randint(1, MOST_ROWS))]
            body["inputs"] = rows
            expected = Expectation(Outcome.SUCCEEDS, [_row_outcome(queue, row) for row in rows])
        else:
            row = self.row(queue)
            body["input"] = row
            expected = expectation_of(queue, row)
        headers = {
            "Content-Type": "application/json",
            "Idempotency-Key": self.unique(),
            "Authorization": f"Bearer {self._kind.name}",
        }
        if self._kind is Producer.HTTP_WAITING:
            headers["Prefer"] = "wait=1"
        self._until_accepted(queue, json.dumps(body).encode(), headers, expected)

    def _until_accepted(self, queue: str, body: bytes, headers: dict[str, str], expected: Expectation) -> None:
        tries = 0
        last_repeat = None
        while True:
            tries += 1
            job_id = self._try(body, headers)
            if job_id is not None:
                self.ledger.note(Sent(job_id, self._kind, f"infer.{queue}", expected, time.time(), tries=tries))
                return
            if self.stopping.is_set():
                last_repeat = last_repeat or time.monotonic() + LAST_REPEATS_S
                if time.monotonic() > last_repeat:
                    self.ledger.complain(f"a submit was never accepted, in {tries} tries")
                    return
            time.sleep(REPEAT_S)

    def _try(self, body: bytes, headers: dict[str, str]) -> str | None:
        """The job's id once it is accepted; None when the answer is missing, or says that the broker is away."""
        try:
            answer = self._client.post("/v1/jobs", content=body, headers=headers)
        except httpx.TransportError:
            return None
        if answer.status_code in (200, 202):
            return str(answer.json()["id"])
        if answer.status_code != 503:
            self.ledger.complain(f"a submit was answered {answer.status_code}: {answer.text[:300]}")
        return None


def _row_outcome(queue: str, row: MarkedRow) -> dict[str, object]:
    """The entry of a row in the result of a job of many."""
    if row["fails"]:
        return {"error": {"type": "ArithmeticError", "message": f"{row['mark']} cannot be served"}}
    return {"output": output_of(queue, row)}


class CeleryProducer(ChaosProducer):
    """A plain Celery client that chooses its ids. Every other one lets Celery repeat a call that did not get through.

    So a call that raised may have been queued all the same, and one that did not raise may have been queued twice.
    """

    def __init__(
        self, number: int, url: str, seed: int, rate: float, ledger: Ledger, stopping: threading.Event
    ) -> None:
        super().__init__(f"celery {number}", seed, rate, ledger, stopping)
        self._repeats = number % 2 == 0
        self._first = number == 0
        self._calls = 0
        self._app = Celery(broker=url, set_as_current=False)
        self._app.conf.broker_transport_options = {"socket_timeout": HTTP_PATIENCE_S, "socket_connect_timeout": 5.0}

    def run(self) -> None:
        with self._app:
            super().run()

    def submit(self) -> None:
        self._calls += 1
        queue = self.queue()
        row = self.row(queue)
        if self._first and self._calls % KILLS_EVERY == KILLS_FIRST:
            queue, row = "quick", row | {"kills": True}
        task, expected = "sheaf.infer", expectation_of(queue, row)
        if self.choice.randrange(MISADDRESSED_EVERY) == 0:
            task, expected = "another.task", Expectation(Outcome.DEAD, "another.task")
        delayed = self.choice.randrange(DELAYED_EVERY) == 0
        delay_s = self.choice.uniform(0, LONGEST_DELAY_S) if delayed else None
        task_id = self.unique()
        due_at = time.time() + (delay_s or 0.0)
        accepted = self._send(task, row, f"infer.{queue}", task_id, self.choice.randrange(10), delay_s)
        accepted_at = time.time() if accepted else None
        self.ledger.note(Sent(task_id, Producer.CELERY, f"infer.{queue}", expected, accepted_at, due_at))

    def _send(self, task: str, row: MarkedRow, queue: str, task_id: str, priority: int, delay_s: float | None) -> bool:
        try:
            self._app.send_task(
                task,
                args=[row],
                queue=queue,
                task_id=task_id,
                priority=priority,
                countdown=delay_s,
                retry=self._repeats,
            )
        except Exception:
            # Kombu lets more through than its own errors: AttributeError, when the connection is closed under it.
            return False
        return True
