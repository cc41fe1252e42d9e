"""`sheaf dead`, on letters that a real worker put there."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.services import run_sheaf
from tests.workers.conftest import Shop

LETTERS = "sheaf:dead:infer.echo"

Dead = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def dead(shop: Shop, tmp_path: Path) -> Dead:
    """Runs `sheaf dead …` against the shop's server."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_sheaf("dead", *arguments, folder=tmp_path, SHEAF_BROKER__URL=shop.url)

    return run


@pytest.fixture
def buried(shop: Shop) -> list[str]:
    """Ids of three calls that cannot be served; with what is no message they are all letters that there are."""
    shop.client.delete(LETTERS)
    sent = [shop.app.send_task("another.task", args=[n], queue="infer.echo").id for n in range(3)]
    shop.client.lpush("infer.echo", b"\xff\x00 no JSON")
    wait_until(lambda: shop.client.llen(LETTERS) == 4, description="all are with the dead letters")
    return sent


def test_letters_are_listed_with_their_reasons(dead: Dead, buried: list[str]) -> None:
    listed = json.loads(dead("list", "echo", "--json").stdout)
    assert [letter["job_id"] for letter in listed] == [None, *reversed(buried)]
    assert "not JSON" in listed[0]["reason"]
    assert "not 'another.task'" in listed[1]["reason"]
    assert dead("list").stdout.splitlines()[-1] == "minilm: 0, echo: 4, sheaf.callbacks: 0 dead letters"
    assert len(dead("list", "echo", "--limit", "2").stdout.splitlines()) == 3


def test_a_letter_is_shown_with_its_message(dead: Dead, buried: list[str]) -> None:
    shown = json.loads(dead("show", "echo", buried[0], "--json").stdout)
    assert json.loads(shown["message"])["headers"]["id"] == buried[0]
    number = json.loads(dead("list", "echo", "--json").stdout)[0]["number"]
    assert r"\xff" in dead("show", "echo", number).stdout


def test_what_a_letter_holds_moves_no_cursor(shop: Shop, dead: Dead, buried: list[str]) -> None:
    shop.client.lpush("infer.echo", "\x9b31m no\njob \x1b[2J".encode())
    wait_until(lambda: shop.client.llen(LETTERS) == len(buried) + 2, description="it is with the dead letters")
    [letter] = json.loads(dead("list", "echo", "--limit", "1", "--json").stdout)
    shown = dead("show", "echo", letter["number"]).stdout + dead("list", "echo").stdout
    assert all(line.isprintable() for line in shown.removesuffix("\n").split("\n"))
    assert r"\u009b31m no\njob \u001b[2J" in shown


def test_a_retried_letter_runs_again(dead: Dead, buried: list[str]) -> None:
    """It cannot be served this time either, so it comes back as a new letter."""
    before = {letter["job_id"]: letter["number"] for letter in json.loads(dead("list", "echo", "--json").stdout)}
    assert dead("retry", "echo", buried[1]).stdout == "1 put back on infer.echo\n"

    def came_back() -> bool:
        now = {letter["job_id"]: letter["number"] for letter in json.loads(dead("list", "echo", "--json").stdout)}
        return now.keys() == before.keys() and now[buried[1]] != before[buried[1]]

    wait_until(came_back, description="it was tried again")


def test_letters_can_be_thrown_away(dead: Dead, buried: list[str]) -> None:
    assert dead("purge", "echo", buried[0], buried[1]).stdout == "2 thrown away\n"
    assert dead("purge", "echo", "--all").stdout == "2 thrown away\n"
    assert json.loads(dead("list", "echo", "--json").stdout) == []


def test_what_is_not_there_is_told_in_one_line(dead: Dead, buried: list[str]) -> None:
    for arguments, said in (
        (("show", "echo", "no-such"), "infer.echo has no dead letter no-such: see `sheaf dead list echo`"),
        (("retry", "echo"), "name letters by number or job id, or give --all"),
    ):
        done = dead(*arguments)
        assert done.returncode == 1
        assert done.stderr == f"sheaf: {said}\n"
