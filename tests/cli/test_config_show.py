"""The `sheaf` command as a person meets it: help, settings, and errors in one line."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from tests.services import run_sheaf


def test_every_value_is_shown_with_its_origin(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("api: {port: 8001}")
    done = run_sheaf("--config", "own.yaml", "config", "show", folder=tmp_path, SHEAF_FLOWER__PORT="5001")
    shown = dict(line.split(":", 1) for line in done.stdout.splitlines() if not line.startswith("#"))
    assert shown["api.port"].split("  # ") == [" 8001".ljust(len(shown["api.port"].split("  # ")[0])), str(file)]
    assert shown["flower.port"].endswith("# SHEAF_FLOWER__PORT")
    assert shown["models.minilm.task"].endswith("# base.yaml")
    assert shown["workers.tf32"].endswith("# default")


def test_settings_can_be_read_by_programs_and_tell_no_password(tmp_path: Path) -> None:
    done = run_sheaf(
        "config", "show", "--json", folder=tmp_path,
        SHEAF_BROKER__URL="redis://me:hidden-1@example.org/0", SHEAF_FLOWER__BASIC_AUTH="me:hidden-2",
    )  # fmt: skip
    rows = {row["key"]: row for row in json.loads(done.stdout)}
    assert rows["broker.url"] == {
        "key": "broker.url", "value": "redis://me:**********@example.org/0", "origin": "SHEAF_BROKER__URL",
    }  # fmt: skip
    assert "hidden" not in done.stdout


def test_wrong_settings_are_told_line_by_line(tmp_path: Path) -> None:
    done = run_sheaf("config", "show", folder=tmp_path, SHEAF_API__PROT="1", SHEAF_API__PORT="x")
    assert done.returncode == 2
    assert done.stdout == ""
    assert sorted(done.stderr.splitlines()) == [
        "sheaf: api.port (from SHEAF_API__PORT): Input should be a valid integer, "
        "unable to parse string as an integer, not 'x'",
        "sheaf: api.prot (from SHEAF_API__PROT): unknown key; did you mean api.port?",
    ]


def test_help_names_every_command_and_each_has_help_of_its_own(tmp_path: Path) -> None:
    shown = run_sheaf("--help", folder=tmp_path).stdout
    parts = ["up", "api", "worker", "io", "flower", "broker"]
    for command in [*parts, "config", "bench", "dead", "keys", "webhooks", "tune", "version"]:
        assert f" {command} " in shown
        own = CliRunner().invoke(app, [command, "--help"])
        assert own.exit_code == 0
        assert len(own.stdout) > 100


@pytest.mark.parametrize(
    ("arguments", "environ", "said"),
    [
        (("broker",), {"SHEAF_BROKER__URL": "redis://x"}, "only with `embedded`"),
        (("worker", "--devices", "7"), {}, "workers.devices names GPU 7, but this machine"),
        (("keys", "create", "shop", "--scopes", "everything"), {}, "it is one of submit, read, admin, metrics"),
        (("keys", "create", "shop", "--rate", "fast"), {}, "write it as 100/minute"),
        (("keys", "create", "two words"), {}, "is no owner"),
        (("keys", "create", "shop", "--expires", "soon"), {}, "write it as 90d"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], environ: dict[str, str], said: str
) -> None:
    done = run_sheaf(*arguments, folder=tmp_path, **environ)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert said in line


def test_the_version_is_the_packages(tmp_path: Path) -> None:
    assert run_sheaf("version", folder=tmp_path).stdout == "0.1.0\n"
    assert run_sheaf("--version", folder=tmp_path).stdout == "0.1.0\n"


@pytest.mark.parametrize(
    ("command", "key"), [("api", "api.port"), ("flower", "flower.port"), ("broker", "broker.embedded_port")]
)
def test_a_taken_port_is_told_in_one_line(tmp_path: Path, command: str, key: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        variable = "SHEAF_" + key.upper().replace(".", "__")
        done = run_sheaf(command, folder=tmp_path, **{variable: str(port)})
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith(f"sheaf: port {port} on 127.0.0.1 ({key}) cannot be had")
