"""docker-compose.yml and the Dockerfile, as far as they can be checked without a Docker engine: everything they name
must exist in the project and mean there what they take it to mean.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
import yaml

from cli.main import app
from configs import Settings, load_settings
from tests.services import REPOSITORY

COMPOSE: dict[str, Any] = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())
DOCKERFILE = (REPOSITORY / "deploy/Dockerfile").read_text()
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
OURS = ["api", "worker", "io", "flower"]


def environment(service: str) -> dict[str, str]:
    """What the container sees; a variable that has to be given is given."""
    variables = COMPOSE["services"][service]["environment"]
    return {name: re.sub(r"^\$\{.*\}$", "user:password", value) for name, value in variables.items()}


def settings(service: str) -> Settings:
    return load_settings(None, environment(service)).settings


def test_the_services_are_those_that_were_asked_for() -> None:
    assert set(COMPOSE["services"]) == {"redis", "api", "worker", "io", "flower"}


@pytest.mark.parametrize("service", OURS)
def test_every_command_and_option_exists(service: str) -> None:
    name, *options = COMPOSE["services"][service]["command"]
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]  # a group has commands
    command.make_context(name, list(options), resilient_parsing=False)


@pytest.mark.parametrize("service", OURS)
def test_every_environment_key_is_a_setting_and_reaches_redis(service: str) -> None:
    assert settings(service).broker.url == "redis://redis:6379/0"


def test_published_ports_are_the_ones_that_the_services_listen_on() -> None:
    published = {
        service: [port.rpartition(":")[2] for port in definition.get("ports", [])]
        for service, definition in COMPOSE["services"].items()
    }
    assert published["api"] == [str(settings("api").api.port)]
    assert published["flower"] == [str(settings("flower").flower.port)]
    assert COMPOSE["services"]["worker"]["expose"] == [str(settings("worker").workers.metrics_port)]
    assert COMPOSE["services"]["io"]["expose"] == [str(settings("io").io.metrics_port)]
    assert {settings("api").api.host, settings("flower").flower.host, settings("worker").workers.metrics_host} == {
        "0.0.0.0"
    }


@pytest.mark.parametrize("service", OURS)
def test_health_checks_ask_pages_that_exist(service: str) -> None:
    [found] = re.findall(
        r"http://127\.0\.0\.1:(\d+)(/\w+)", " ".join(COMPOSE["services"][service]["healthcheck"]["test"])
    )
    own = settings(service)
    assert (int(found[0]), found[1]) == {
        "api": (own.api.port, "/livez"),
        "worker": (own.workers.metrics_port, "/metrics"),
        "io": (own.io.metrics_port, "/metrics"),
        "flower": (own.flower.port, "/healthcheck"),
    }[service]


def test_the_worker_reserves_the_gpus_and_gets_time_to_stop() -> None:
    worker = COMPOSE["services"]["worker"]
    [device] = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert int(worker["stop_grace_period"].removesuffix("s")) > settings("worker").workers.shutdown_grace_s


def test_nothing_is_published_beyond_loopback_and_flower_needs_a_password() -> None:
    ports = [port for definition in COMPOSE["services"].values() for port in definition.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert COMPOSE["services"]["flower"]["environment"]["SHEAF_FLOWER__BASIC_AUTH"].startswith(
        "${SHEAF_FLOWER__BASIC_AUTH:?"
    )


def test_redis_keeps_what_it_accepted() -> None:
    command = " ".join(COMPOSE["services"]["redis"]["command"])
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command
    [volume] = COMPOSE["services"]["redis"]["volumes"]
    assert volume.partition(":")[0] in COMPOSE["volumes"]


def test_weights_are_mounted_where_the_settings_look_for_them() -> None:
    [mount] = COMPOSE["services"]["worker"]["volumes"]
    source, target, mode = mount.split(":")
    assert (REPOSITORY / source / ".gitkeep").is_file()
    assert target == f"{instruction('WORKDIR')[-1]}/models"
    assert mode == "ro"
    assert str(settings("worker").models["minilm"].source).startswith("models/")


def test_the_api_and_the_io_worker_keep_files_in_the_same_volume_which_the_images_user_may_write() -> None:
    mounts = {COMPOSE["services"][service]["volumes"][0] for service in ("api", "io")}
    [(volume, target)] = [tuple(mount.split(":")) for mount in mounts]
    assert volume in COMPOSE["volumes"]
    folders = {f"{instruction('WORKDIR')[-1]}/{settings(service).files.storage}" for service in ("api", "io")}
    assert folders == {target}
    [made] = [line for line in instruction("RUN") if "install --directory" in line]
    assert f"--owner {instruction('USER')[0]} " in made
    assert target in made.split()


def instruction(name: str) -> list[str]:
    return [argument for found, argument in instructions() if found == name]


def instructions() -> Iterator[tuple[str, str]]:
    for line in DOCKERFILE.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, argument = line.partition(" ")
            yield name, argument.strip()


def copied() -> list[str]:
    return [
        source for argument in instruction("COPY") if "--from" not in argument for source in shlex.split(argument)[:-1]
    ]


def test_the_image_stands_on_a_cuda_base_and_starts_our_command() -> None:
    assert all(base.startswith("nvidia/cuda:") for base in instruction("FROM"))
    assert instruction("ENTRYPOINT") == ['["sheaf"]']
    assert "sheaf" in PYPROJECT["project"]["scripts"]
    assert instruction("USER") == ["sheaf"]


def test_the_image_holds_every_package_of_the_project_and_all_that_is_copied_exists() -> None:
    packages = {path.parent.name for path in REPOSITORY.glob("*/__init__.py")} - {"tests"}
    assert packages <= set(copied())
    assert [source for source in copied() if not (REPOSITORY / source).exists()] == []


def test_what_is_copied_is_not_ignored_and_no_weights_are() -> None:
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    assert {source.partition("/")[0] for source in copied()} == allowed
    assert "models" not in allowed
    assert "model.lock" not in DOCKERFILE


def test_the_compose_file_builds_this_image() -> None:
    for service in OURS:
        build = COMPOSE["services"][service]["build"]
        assert (REPOSITORY / build["context"] / build["dockerfile"]).is_file()
        assert COMPOSE["services"][service]["image"] == f"sheaf:{PYPROJECT['project']['version']}"
        assert set(COMPOSE["services"][service]["depends_on"]) <= set(COMPOSE["services"])
