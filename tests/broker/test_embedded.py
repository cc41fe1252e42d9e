"""The embedded server: what it keeps, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from broker import EmbeddedServerError
from broker.embedded import EmbeddedServer
from tests.conftest import free_port


def test_what_was_accepted_is_there_after_a_restart(new_valkey: EmbeddedServer) -> None:
    with redis.Redis.from_url(new_valkey.url) as client:
        client.lpush("infer.echo", "message")
    new_valkey.stop()
    new_valkey.start()
    with redis.Redis.from_url(new_valkey.url) as client:
        assert client.lrange("infer.echo", 0, -1) == [b"message"]


def test_two_servers_never_use_one_folder(new_valkey: EmbeddedServer) -> None:
    second = EmbeddedServer(free_port(), new_valkey.data_dir)
    with pytest.raises(
        EmbeddedServerError, match=r"another server uses the data in .*: stop it, or set broker\.data_dir"
    ):
        second.start()
    new_valkey.kill()
    second.start()
    second.stop()


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    server = EmbeddedServer(free_port(), tmp_path, extra=("--no-such-option", "1"))
    with pytest.raises(EmbeddedServerError, match="no-such-option"):
        server.start()
