"""Who may call: keys, scopes, owners, and where the API listens without any."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import redis

from broker import BatchEvent, JobEvent, Scope
from tests.api.front import Front, front
from tests.conftest import wait_until
from tests.services import run_sheaf, sample

OPEN = {"/livez", "/readyz", "/v2/health/live", "/v2/health/ready"}
JOB = {"model": "echo", "input": 1}
#: Seconds; longer than whatever is to end a wait before its time takes.
WAIT_S = 40


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A front whose keys are in force."""
    with front(tmp_path_factory.mktemp("guarded"), api={"max_wait_s": WAIT_S}) as made:
        made.key("somebody")
        in_force(made)
        yield made


@pytest.fixture
def unguarded(tmp_path: Path) -> Iterator[Front]:
    with front(tmp_path) as made:
        yield made


def in_force(made: Front) -> None:
    with made.client() as client:
        wait_until(lambda: client.get("/v1/jobs").status_code == 401, description="keys are in force")


def test_who_follows_a_job_with_a_key_that_is_revoked_is_shut_out(guarded: Front) -> None:
    key = guarded.key("follower")
    with guarded.client(key) as client:
        job_id = submitted(client)
        with client.stream("GET", f"/v1/jobs/{job_id}/events") as events:
            lines = events.iter_lines()
            assert any(line == "event: queued" for line in lines)
            guarded.sheaf("keys", "revoke", key.split("_")[1])
            assert not any(line.startswith("event:") for line in lines)


WAITS: dict[str, tuple[str, str, object]] = {
    "post": ("POST", f"/v1/jobs?wait={WAIT_S}", JOB),
    "put": ("PUT", f"/v1/jobs/7d444840-9dc0-11d1-b245-5ffdce74fad3?wait={WAIT_S}", JOB),
    "get": ("GET", f"/v1/jobs/{{job_id}}?wait={WAIT_S}", None),
    "openai": ("POST", "/v1/embeddings", {"model": "minilm", "input": "a text"}),
    "open inference": (
        "POST",
        "/v2/models/minilm/infer",
        {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a text"]}]},
    ),
}


@contextmanager
def waiting(guarded: Front, key: str, sort: str) -> Iterator[Future[httpx.Response]]:
    """A request of this sort that waits for a job that nobody runs; its answer."""
    method, path, body = WAITS[sort]
    with guarded.client(key) as client, guarded.client(guarded.key("scraper", Scope.METRICS)) as scraper:
        url = path.format(job_id=submitted(client))
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client.request, method, url, json=body, timeout=2 * WAIT_S)
            wait_until(
                lambda: answer.done() or sample(scraper.get("/metrics").text, "sheaf_waiters") == 1,
                description="it waits",
            )
            assert not answer.done()
            yield answer


@pytest.mark.parametrize("sort", WAITS)
def test_who_waits_with_a_key_that_is_revoked_is_shut_out_at_once(guarded: Front, sort: str) -> None:
    key = guarded.key(f"leaver by {sort}")
    with waiting(guarded, key, sort) as answer:
        guarded.sheaf("keys", "revoke", key.split("_")[1])
        told = answer.result(timeout=WAIT_S / 2)
    assert kind(told) == (401, "unauthenticated")
    assert told.headers["www-authenticate"].startswith("Bearer")


def test_who_waits_with_a_key_that_expires_is_shut_out_at_once(guarded: Front) -> None:
    with waiting(guarded, guarded.key("visitor", expires_at=time.time() + 4), "get") as answer:
        assert kind(answer.result(timeout=WAIT_S / 2)) == (401, "unauthenticated")


@pytest.mark.parametrize("sort", ["openai", "open inference"])
def test_what_a_shut_out_caller_waited_for_and_nobody_can_read_is_cancelled(guarded: Front, sort: str) -> None:
    key, left = (guarded.key(f"team by {sort}") for _ in range(2))
    with waiting(guarded, key, sort) as answer:
        guarded.sheaf("keys", "revoke", key.split("_")[1])
        assert answer.result(timeout=WAIT_S / 2).status_code == 401
    with guarded.client(left) as client:
        jobs = client.get("/v1/jobs").json()["data"]
    assert [job["status"] for job in jobs] == ["cancelled", "queued"]


def test_a_stranger_learns_nothing_of_what_a_query_may_hold(guarded: Front) -> None:
    with guarded.client() as client:
        for query in ("/v1/jobs?status=odd", "/v1/jobs?limit=0", "/v1/jobs/none?wait=soon"):
            assert kind(client.get(query)) == (401, "unauthenticated")


def test_an_administrator_lists_the_jobs_of_any_owner(guarded: Front) -> None:
    with guarded.client(guarded.key("listed")) as client, guarded.client(guarded.key("boss", Scope.ADMIN)) as boss:
        job_id = submitted(client)
        [listed] = boss.get("/v1/jobs", params={"owner": "listed"}).json()["data"]
        assert listed["id"] == job_id
        assert len(client.get("/v1/jobs", params={"owner": "listed"}).json()["data"]) == 1
        assert kind(client.get("/v1/jobs", params={"owner": "boss"})) == (403, "missing-scope")


def submitted(client: httpx.Client, **fields: object) -> str:
    answer = client.post("/v1/jobs", json=JOB | fields)
    assert answer.status_code == 202, answer.text
    job_id: str = answer.json()["id"]
    return job_id


def kind(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json"
    return answer.status_code, answer.json()["type"].removeprefix("urn:sheaf:error:")


def test_nobody_gets_in_without_a_key_but_to_the_probes(guarded: Front) -> None:
    with guarded.client() as client:
        document = client.get("/openapi.json").json()
        asked = 0
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                url = path.replace("{job_id}", "00000000-0000-4000-8000-000000000000").replace("{name}", "echo")
                answer = client.request(method, url, json=JOB if method in ("post", "put") else None)
                if path in OPEN:
                    assert answer.status_code in (200, 503), path
                    assert "security" not in operation
                else:
                    assert kind(answer) == (401, "unauthenticated"), path
                    assert answer.headers["www-authenticate"].startswith("Bearer")
                    assert "401" in operation["responses"], path
                asked += 1
        assert asked > 8


@pytest.mark.parametrize(
    "authorization",
    [
        "Bearer sheaf_0123456789ab_" + "x" * 43,
        "Bearer x",
        "Basic c2hlYWY6c2hlYWY=",
        "Bearer",
        "bearer sheaf__",
        "Bearer " + "a" * 5000,
    ],
)
def test_what_is_no_key_opens_nothing(guarded: Front, authorization: str) -> None:
    with guarded.client(authorization=authorization) as client:
        assert kind(client.post("/v1/jobs", json=JOB)) == (401, "unauthenticated")


def test_a_key_whose_last_letter_is_wrong_opens_nothing(guarded: Front) -> None:
    key = guarded.key("shop")
    other = key[:-1] + ("A" if key[-1] != "A" else "B")
    with guarded.client(key) as right, guarded.client(other) as wrong:
        submitted(right)
        assert kind(wrong.post("/v1/jobs", json=JOB)) == (401, "unauthenticated")


def test_the_last_key_is_not_revoked_by_mistake(unguarded: Front) -> None:
    made = json.loads(unguarded.sheaf("keys", "create", "shop", "--json"))
    with pytest.raises(AssertionError, match="give --last"):
        unguarded.sheaf("keys", "revoke", made["id"])
    in_force(unguarded)
    assert "Revoked. It was the last one" in unguarded.sheaf("keys", "revoke", made["id"], "--last")


def test_the_webhook_of_a_key_is_told_of_jobs_that_name_none(guarded: Front) -> None:
    url, own = "https://8.8.8.8/of-the-key", "https://8.8.8.8/of-the-job"
    options = ("--webhook-url", url, "--webhook-events", "job.cancelled,job.failed")
    made = json.loads(guarded.sheaf("keys", "create", "teller", *options, "--json"))
    assert (made["webhook"], made["webhook_events"]) == (url, ["job.cancelled", "job.failed"])
    with guarded.client(made["key"]) as client:

        def told(**fields: object) -> list[tuple[str, str]]:
            job_id = submitted(client, **fields)
            assert client.post(f"/v1/jobs/{job_id}/cancel").status_code == 200
            deliveries = client.get(f"/v1/jobs/{job_id}/deliveries").json()["data"]
            return [(one["url"], one["event"]) for one in deliveries]

        assert told() == [(url, "job.cancelled")]
        assert told(webhook={"url": own}) == [(own, "job.cancelled")]
        assert told(webhook=None) == []


def test_keys_are_listed_with_the_ends_that_their_webhooks_are_told_of(guarded: Front) -> None:
    events = {"some": ["job.failed"], "all": [*JobEvent, *BatchEvent]}
    for owner, told in events.items():
        chosen = ("--webhook-events", ",".join(told)) if owner == "some" else ()
        guarded.sheaf("keys", "create", f"told-of-{owner}", "--webhook-url", "https://8.8.8.8/", *chosen)
    listed = {key["owner"]: key for key in json.loads(guarded.sheaf("keys", "list", "--json"))}
    assert listed["somebody"]["webhook_events"] is None
    lines = guarded.sheaf("keys", "list").splitlines()
    for owner, told in events.items():
        assert listed[f"told-of-{owner}"]["webhook_events"] == told
        [line] = [line for line in lines if f"owner=told-of-{owner} " in line]
        assert f"  webhook_events={','.join(told)}  " in line


def test_an_owner_with_a_key_has_a_secret_and_keeps_it_without(guarded: Front) -> None:
    made = json.loads(guarded.sheaf("keys", "create", "signer", "--json"))
    first = guarded.sheaf("webhooks", "secret", "--owner", "signer")
    guarded.sheaf("keys", "revoke", made["id"])
    assert guarded.sheaf("webhooks", "secret", "--owner", "signer") == first
    rotated = json.loads(guarded.sheaf("webhooks", "secret", "--owner", "signer", "--rotate", "--json"))
    assert rotated["previous"] == first.strip() != rotated["current"]


@pytest.mark.parametrize("options", [(), ("--rotate",)])
def test_no_secret_is_made_for_an_owner_without_a_key(guarded: Front, options: tuple[str, ...]) -> None:
    guarded.key("spelled")
    with pytest.raises(AssertionError, match="there is no owner 'speled': see `sheaf keys list`"):
        guarded.sheaf("webhooks", "secret", "--owner", "speled", *options)
    with redis.Redis.from_url(guarded.broker.url) as plain:
        assert plain.keys("*speled*") == []
    assert guarded.sheaf("webhooks", "secret").startswith("whsec_")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--webhook-url", "https://169.254.169.254/latest"),
            "--webhook-url: the address 169.254.169.254 is not public",
        ),
        (("--webhook-url", "https://8.8.8.8/", "--webhook-events", "job.done"), "'job.done' is no event"),
        (("--webhook-events", "job.failed"), "give that too"),
    ],
)
def test_a_webhook_of_a_key_that_cannot_be_is_refused(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    done = run_sheaf("keys", "create", "teller", *options, folder=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr


def test_a_key_is_shown_once_and_kept_as_a_hash(guarded: Front) -> None:
    made = json.loads(guarded.sheaf("keys", "create", "shop", "--rate", "100/minute", "--json"))
    key, secret = made["key"], made["key"].rpartition("_")[2]
    assert (made["owner"], made["scopes"], made["rate"]) == ("shop", ["submit", "read"], "100/minute")
    with guarded.client(key) as client:
        submitted(client)
    assert secret not in guarded.sheaf("keys", "list") + guarded.sheaf("keys", "list", "--json")
    with redis.Redis.from_url(guarded.broker.url) as plain:
        kept = plain.hgetall("sheaf:keys")
    assert kept
    assert secret not in str(kept)
    assert secret not in guarded.service.log()


def test_scopes_bound_what_a_key_may_do(guarded: Front) -> None:
    with (
        guarded.client(guarded.key("a", Scope.SUBMIT)) as submit,
        guarded.client(guarded.key("a", Scope.READ)) as read,
        guarded.client(guarded.key("a", Scope.METRICS)) as scrape,
    ):
        job_id = submitted(submit)
        assert kind(submit.get(f"/v1/jobs/{job_id}")) == (403, "missing-scope")
        assert read.get(f"/v1/jobs/{job_id}").json()["status"] == "queued"
        assert kind(read.post("/v1/jobs", json=JOB)) == (403, "missing-scope")
        assert kind(read.post(f"/v1/jobs/{job_id}/cancel")) == (403, "missing-scope")
        assert kind(read.get("/metrics")) == (403, "missing-scope")
        assert scrape.get("/metrics").status_code == 200
        assert kind(scrape.get("/v1/models")) == (403, "missing-scope")
        assert submit.post(f"/v1/jobs/{job_id}/cancel").json()["status"] == "cancelled"


def test_another_owners_job_does_not_exist(guarded: Front) -> None:
    with guarded.client(guarded.key("mine")) as mine, guarded.client(guarded.key("theirs")) as theirs:
        job_id = submitted(mine)
        unknown = kind(theirs.get("/v1/jobs/00000000-0000-4000-8000-000000000000"))
        assert unknown == (404, "unknown-job")
        for answer in (
            theirs.get(f"/v1/jobs/{job_id}"),
            theirs.get(f"/v1/jobs/{job_id}", params={"wait": 1}),
            theirs.get(f"/v1/jobs/{job_id}/events"),
            theirs.post(f"/v1/jobs/{job_id}/cancel"),
        ):
            assert kind(answer) == unknown
        assert theirs.get("/v1/jobs").json()["data"] == []
        assert [job["id"] for job in mine.get("/v1/jobs").json()["data"]] == [job_id]
        assert mine.get(f"/v1/jobs/{job_id}").json()["status"] == "queued"


def test_keys_of_one_owner_see_the_same_jobs_and_an_admin_sees_all(guarded: Front) -> None:
    with (
        guarded.client(guarded.key("team")) as one,
        guarded.client(guarded.key("team")) as other,
        guarded.client(guarded.key("boss", Scope.ADMIN)) as boss,
    ):
        job_id = submitted(one)
        assert other.get(f"/v1/jobs/{job_id}").status_code == 200
        assert boss.post(f"/v1/jobs/{job_id}/cancel").json()["status"] == "cancelled"


def test_an_idempotency_key_of_one_owner_is_nothing_to_another(guarded: Front) -> None:
    header = {"Idempotency-Key": "order-7"}
    with guarded.client(guarded.key("x")) as one, guarded.client(guarded.key("y")) as other:
        ids = {client.post("/v1/jobs", json=JOB, headers=header).json()["id"] for client in (one, other, one, other)}
    assert len(ids) == 2


def test_a_chosen_id_of_anothers_job_is_taken_and_tells_nothing(guarded: Front) -> None:
    url = "/v1/jobs/7d444840-9dc0-11d1-b245-5ffdce74fad2"
    with guarded.client(guarded.key("p")) as one, guarded.client(guarded.key("q")) as other:
        assert one.put(url, json=JOB).status_code == 202
        assert kind(other.put(url, json=JOB)) == (409, "id-taken")
        assert kind(other.get(url)) == (404, "unknown-job")


def test_priorities_of_a_key(guarded: Front) -> None:
    with guarded.client(guarded.key("low", priorities=["low"])) as client:
        assert kind(client.post("/v1/jobs", json=JOB | {"priority": "high"})) == (403, "priority-forbidden")
        assert client.get(f"/v1/jobs/{submitted(client)}").json()["priority"] == "low"


def test_a_revoked_key_opens_nothing_within_moments(guarded: Front) -> None:
    key = guarded.key("leaver")
    with guarded.client(key) as client:
        submitted(client)
        guarded.sheaf("keys", "revoke", key.split("_")[1])
        wait_until(lambda: client.get("/v1/jobs").status_code == 401, description="the key is revoked", timeout_s=5)


def test_a_key_whose_time_is_over_opens_nothing(guarded: Front) -> None:
    with guarded.client(guarded.key("guest", expires_at=time.time() + 1.5)) as client:
        assert client.get("/v1/jobs").status_code == 200
        wait_until(lambda: client.get("/v1/jobs").status_code == 401, description="the key has expired")


def test_a_new_key_opens_at_once(guarded: Front) -> None:
    for _ in range(3):
        with guarded.client(guarded.key("new")) as client:
            assert client.get("/v1/jobs").status_code == 200


def test_readiness_names_no_models_to_strangers(guarded: Front) -> None:
    with guarded.client() as stranger, guarded.client(guarded.key("friend")) as friend:
        assert "echo" not in stranger.get("/readyz").text
        assert "echo" in friend.get("/readyz").text


def test_log_lines_say_which_key_called_and_never_the_key(guarded: Front) -> None:
    key = guarded.key("logged")
    with guarded.client(key) as client:
        job_id = submitted(client)

    def line() -> dict[str, object] | None:
        lines = [json.loads(text) for text in guarded.service.log().splitlines() if job_id in text]
        return lines[0] if lines else None

    wait_until(line, description="the request is logged")
    found = line()
    assert found is not None
    assert found["key_id"] == key.split("_")[1]


def test_without_keys_everybody_on_this_machine_may_call_until_there_is_one(unguarded: Front) -> None:
    with unguarded.client() as client:
        before = submitted(client)
        assert client.get(f"/v1/jobs/{before}").status_code == 200
        assert client.get("/metrics").status_code == 200
        key = unguarded.key("first")
        in_force(unguarded)
        with unguarded.client(key) as owner:
            submitted(owner)
            # Nobody's job is not theirs.
            assert kind(owner.get(f"/v1/jobs/{before}")) == (404, "unknown-job")


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "", "127.0.0.1.nip.io", "a@127.0.0.1", "a:b@localhost:80"]
)
def test_without_keys_a_name_that_points_here_is_refused(unguarded: Front, host: str) -> None:
    with unguarded.client(host=host) as client:
        assert kind(client.post("/v1/jobs", json=JOB)) == (421, "misdirected")
    for own in ("localhost", "localhost:8000", "[::1]:8000", "127.0.0.1"):
        with unguarded.client(host=own) as client:
            submitted(client)


def outside() -> str:
    """An address of this machine that others can reach."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family is socket.AF_INET and not address.address.startswith("127."):
                return address.address
    pytest.skip("this machine has no address but loopback")


def reaches(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(2)
        return probe.connect_ex((host, port)) == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_without_keys_the_api_listens_on_loopback_only_until_there_is_one(tmp_path: Path, workers: int) -> None:
    address = outside()
    with front(tmp_path, host="0.0.0.0", api={"workers": workers}) as made:
        port = made.config["api"]["port"]
        assert not reaches(address, port)
        assert "listens on loopback only" in made.service.log()
        key = made.key("first")
        wait_until(lambda: reaches(address, port), description="it listens where it should, now that there is a key")
        with made.client(key) as client:
            wait_until(lambda: client.get(f"http://{address}:{port}/v1/jobs").status_code == 200, description="let in")
        with made.client() as client:
            assert kind(client.get(f"http://{address}:{port}/v1/jobs")) == (401, "unauthenticated")


def test_open_to_all_has_to_be_said(tmp_path: Path) -> None:
    address = outside()
    with front(tmp_path, host="0.0.0.0", auth={"mode": "none"}) as made:
        answer = httpx.post(f"http://{address}:{made.config['api']['port']}/v1/jobs", json=JOB)
        assert answer.status_code == 202


def test_pages_have_their_own_switches(tmp_path: Path) -> None:
    with front(tmp_path, api={"docs": False, "metrics": "off"}) as made, made.client() as client:
        assert [client.get(path).status_code for path in ("/docs", "/openapi.json", "/metrics", "/")] == [404] * 4


def test_metrics_may_be_open_while_keys_are_in_force(tmp_path: Path) -> None:
    with front(tmp_path, api={"metrics": "open"}) as made, made.client() as client:
        made.key("somebody")
        in_force(made)
        assert client.get("/metrics").status_code == 200


def test_while_the_broker_is_away_the_known_keys_hold_and_strangers_stay_out(tmp_path: Path) -> None:
    with front(tmp_path) as made:
        key = made.key("shop")
        in_force(made)
        made.broker.kill()
        begin = time.monotonic()
        with made.client() as stranger, made.client(key) as known:
            assert kind(stranger.post("/v1/jobs", json=JOB))[0] == 401
            assert kind(known.post("/v1/jobs", json=JOB)) == (503, "broker-unavailable")
        assert time.monotonic() - begin < 15
