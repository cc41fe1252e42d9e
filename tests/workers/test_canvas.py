"""What Celery clients hang on their calls: link, link_error, chain, chord; with a stock worker for the shop's tasks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from celery import Celery, Signature, chain, chord, group
from celery.exceptions import ChordError, TaskRevokedError
from celery.result import AsyncResult

from broker.embedded import EmbeddedServer
from tests.conftest import free_port, wait_until
from tests.services import REPOSITORY, Service
from tests.workers.conftest import MODELS, announced, celery_app, held

ECHO, PICKY = "infer.echo", "infer.picky"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedServer(free_port(), tmp_path_factory.mktemp("valkey")) as server:
        yield server.url


@pytest.fixture(scope="module")
def start(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Service]]:
    """Starts a part of the service and waits until it has announced itself."""
    started: list[Service] = []

    def start_part(*command: str) -> Service:
        config: dict[str, object] = {
            "broker": {"url": url, "lease_s": 1.0},
            "workers": {"metrics_port": free_port()},
            "io": {"metrics_port": free_port(), "task_routes": {"shop.*": "shop"}},
            "models": MODELS,
        }
        service = Service(*command, config=config, folder=tmp_path_factory.mktemp(command[0]))
        service.start()
        started.append(service)
        wait_until(lambda: announced(url, service), description=f"{command} is ready", timeout_s=60)
        return service

    yield start_part
    for service in started:
        service.kill()


@pytest.fixture(scope="module")
def io_worker(start: Callable[..., Service]) -> Service:
    start("device", "--device", "cpu")
    return start("io")


@pytest.fixture(scope="module")
def shop(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A stock worker with the shop's tasks."""
    log = tmp_path_factory.mktemp("shop") / "output.log"
    command = [sys.executable, "-m", "celery", "-A", "tests.workers.shop", "worker"]
    command += ["--pool=solo", "--queues=shop", "--loglevel=info"]
    environment = os.environ | {"SHOP_URL": url, "PYTHONPATH": str(REPOSITORY)}
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output, cwd=log.parent, env=environment) as process,
    ):
        try:
            wait_until(lambda: b"ready" in log.read_bytes(), description="the shop's worker is ready", timeout_s=30)
            yield
        finally:
            process.kill()


@pytest.fixture
def client(url: str, io_worker: Service, shop: None) -> Iterator[Celery]:
    with celery_app(url) as app:
        yield app


def infer(client: Celery, value: object, queue: str = ECHO) -> Signature[object]:
    made: Signature[object] = client.signature("sheaf.infer", args=[value], queue=queue)
    return made


def test_a_linked_task_gets_the_result_and_is_a_child_of_it(client: Celery) -> None:
    first: Any = infer(client, "grain").apply_async(link=client.signature("shop.shout"))
    assert first.get(timeout=20) == "grain"
    [child] = first.children
    assert child.get(timeout=20) == "grain!"


def test_several_linked_tasks_and_a_linked_group_are_all_called(client: Celery) -> None:
    links = [client.signature("shop.shout", task_id=f"linked-{n}") for n in range(2)]
    links.append(group(client.signature("shop.shout", task_id=f"grouped-{n}") for n in range(2)))
    infer(client, "grain").apply_async(link=links)
    for task_id in ("linked-0", "linked-1", "grouped-0", "grouped-1"):
        assert AsyncResult(task_id, app=client).get(timeout=20) == "grain!"


def test_a_linked_call_may_be_one_of_ours_again(client: Celery) -> None:
    again = client.signature("sheaf.infer", queue=ECHO, task_id="again")
    infer(client, [1, 2]).apply_async(link=again)
    assert AsyncResult("again", app=client).get(timeout=20) == [1, 2]


def test_an_error_callback_gets_the_id_of_what_failed(client: Celery) -> None:
    errback = client.signature("shop.note_failure", task_id="errback")
    failing = infer(client, -1, PICKY).apply_async(link_error=errback, link=client.signature("shop.shout"))
    with pytest.raises(ArithmeticError, match="minus one"):
        failing.get(timeout=20)
    assert AsyncResult("errback", app=client).get(timeout=20) == f"noted {failing.id}"


def test_a_message_that_cannot_be_served_calls_its_error_callback(client: Celery) -> None:
    errback = client.signature("shop.note_failure", task_id="errback-of-bad")
    bad = client.send_task("sheaf.infer", args=[1, 2, 3], queue=ECHO, link_error=errback)
    assert AsyncResult("errback-of-bad", app=client).get(timeout=20) == f"noted {bad.id}"


def test_a_chain_goes_through_our_queue_and_the_shops(client: Celery) -> None:
    steps = [infer(client, "a"), client.signature("shop.shout"), client.signature("sheaf.infer", queue=ECHO)]
    assert chain(*steps, client.signature("shop.shout"), app=client).apply_async().get(timeout=20) == "a!!"


def test_a_chain_whose_first_step_fails_fails_as_a_whole(client: Celery) -> None:
    result: Any = chain(infer(client, -1, PICKY), client.signature("shop.shout"), app=client).apply_async()
    with pytest.raises(ArithmeticError, match="minus one"):
        result.get(timeout=20)
    assert result.parent.state == "FAILURE"


def test_a_chain_whose_first_step_has_expired_is_revoked_as_a_whole(client: Celery) -> None:
    steps = [infer(client, "late").set(expires=-1), client.signature("shop.shout")]
    with pytest.raises(TaskRevokedError, match="expired"):
        chain(*steps, app=client).apply_async().get(timeout=20)


def test_a_chord_calls_its_body_with_all_results_in_order(client: Celery) -> None:
    header = [infer(client, letter) for letter in "abcdef"]
    result = chord(header, app=client)(client.signature("shop.join"))
    assert result.get(timeout=20) == "a+b+c+d+e+f"


def test_a_chord_with_one_failing_header_fails_and_says_which(client: Celery) -> None:
    header = [infer(client, 1, PICKY), infer(client, -1, PICKY), infer(client, 2, PICKY)]
    result = chord(header, app=client)(client.signature("shop.join"))
    with pytest.raises(ChordError, match="ArithmeticError"):
        AsyncResult(result.id, app=client).get(timeout=20)


def test_a_chord_with_a_revoked_header_does_not_wait_for_ever(client: Celery) -> None:
    header = [infer(client, 1), infer(client, 2).set(expires=-1)]
    result = chord(header, app=client)(client.signature("shop.join"))
    with pytest.raises(ChordError, match="TaskRevokedError"):
        AsyncResult(result.id, app=client).get(timeout=20)


def test_a_chord_whose_header_is_revoked_while_it_runs_or_waits_does_not_wait_for_ever(
    client: Celery, url: str
) -> None:
    header = [infer(client, 1.0, "infer.slow").set(task_id="runs"), infer(client, 0, "infer.slow").set(task_id="waits")]
    result = chord(header, app=client)(client.signature("shop.join"))
    wait_until(lambda: held(url, "infer.slow"), description="they are held")
    client.control.revoke(["runs", "waits"])
    with pytest.raises(ChordError, match="TaskRevokedError"):
        AsyncResult(result.id, app=client).get(timeout=20)
    wait_until(lambda: not held(url, "infer.slow"), description="both have ended")


def test_a_group_inside_a_chain_becomes_a_chord(client: Celery) -> None:
    parts = group(client.signature("sheaf.infer", queue=ECHO) for _ in range(3))
    work = chain(infer(client, "x"), parts, client.signature("shop.join"), app=client)
    assert work.apply_async().get(timeout=20) == "x+x+x"


def test_an_ignored_result_is_handed_on_all_the_same(client: Celery, url: str) -> None:
    link = client.signature("shop.shout", task_id="after-ignored")
    first = infer(client, "quiet").apply_async(link=link, ignore_result=True)
    assert AsyncResult("after-ignored", app=client).get(timeout=20) == "quiet!"
    with redis.Redis.from_url(url) as server:
        assert not server.exists(f"celery-task-meta-{first.id}")


def test_many_rows_are_handed_on_with_their_outcomes(client: Celery) -> None:
    link = client.signature("sheaf.infer", queue=ECHO, task_id="after-rows")
    client.send_task("sheaf.infer", kwargs={"inputs": [1, -1]}, queue=PICKY, link=link)
    outcomes: Any = AsyncResult("after-rows", app=client).get(timeout=20)
    assert outcomes[0] == {"output": 1.0}
    assert outcomes[1]["error"]["type"] == "ArithmeticError"


def test_a_callback_that_cannot_be_called_is_a_dead_letter_with_its_reason(client: Celery, url: str) -> None:
    link: Any = {"task": None, "options": {"queue": 5}}
    result = client.send_task("sheaf.infer", args=["x"], queue=ECHO, link=link)
    assert result.get(timeout=20) == "x"
    with redis.Redis.from_url(url) as server:
        wait_until(lambda: server.llen("sheaf:dead:sheaf.callbacks"), description="it is kept")
        assert result.id in (server.lindex("sheaf:dead:sheaf.callbacks", 0) or b"").decode()


def nested_link(depth: int) -> dict[str, Any]:
    """A signature whose link has a link, and so on."""
    call: dict[str, Any] = {"task": "shop.shout", "args": [], "kwargs": {}, "options": {"queue": "shop"}}
    for _ in range(depth):
        call = {**call, "options": {"queue": "shop", "link": [call]}}
    return call


@pytest.mark.parametrize("link", [{"task": "x", "options": ["bad"]}, nested_link(90)], ids=["no options", "too deep"])
def test_a_canvas_that_cannot_be_carried_on_is_buried_alone(client: Celery, url: str, link: Any) -> None:
    with redis.Redis.from_url(url) as server:
        before = server.llen("sheaf:dead:infer.echo")
        good = [infer(client, n).apply_async() for n in range(10)]
        bad = client.send_task("sheaf.infer", args=["x"], queue=ECHO, link=link)
        good += [infer(client, n).apply_async() for n in range(10)]
        with pytest.raises(Exception, match="what hangs on the call"):
            bad.get(timeout=20)
        assert [result.get(timeout=20) for result in good] == [*range(10)] * 2
        assert server.llen("sheaf:dead:infer.echo") == before + 1


@pytest.mark.parametrize("options", [{"queue": "shop", "compression": "zzz"}, {"queue": "sheaf:workers"}])
def test_a_callback_that_can_never_be_sent_holds_up_no_other(client: Celery, url: str, options: dict[str, Any]) -> None:
    with redis.Redis.from_url(url) as server:
        before = server.llen("sheaf:dead:sheaf.callbacks")
        link: Any = {"task": "shop.shout", "args": [], "kwargs": {}, "options": options}
        client.send_task("sheaf.infer", args=["x"], queue=ECHO, link=link)
        after = infer(client, "y").apply_async(link=client.signature("shop.shout"))
        assert after.get(timeout=20) == "y"
        children: Any = after.children
        assert children[0].get(timeout=20) == "y!"
        wait_until(lambda: server.llen("sheaf:dead:sheaf.callbacks") == before + 1, description="it is kept")


def test_an_error_callback_may_be_one_of_our_jobs(client: Celery) -> None:
    errback = client.signature("sheaf.infer", queue=ECHO, task_id="our-errback")
    failing = infer(client, -1, PICKY).apply_async(link_error=errback)
    assert AsyncResult("our-errback", app=client).get(timeout=20) == failing.id


def test_what_follows_a_result_waits_for_an_io_worker_and_outlives_one_that_is_killed(
    client: Celery, start: Callable[..., Service], io_worker: Service, url: str
) -> None:
    io_worker.kill()
    ids = [f"patient-{n}" for n in range(20)]
    for task_id in ids:
        infer(client, task_id).apply_async(link=client.signature("shop.shout", task_id=task_id))
    with redis.Redis.from_url(url) as server:
        wait_until(lambda: server.llen("sheaf.callbacks") == 20, description="all wait")
    doomed = start("io")
    doomed.kill()
    start("io")
    assert [AsyncResult(task_id, app=client).get(timeout=20) for task_id in ids] == [f"{one}!" for one in ids]
