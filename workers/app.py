"""The Celery application: what `celery -A workers.app`, Flower and our own worker process share.

Celery keeps control commands, events and heartbeats. The model queues are not among its queues: the drain
serves those, so that no message is ever in Celery's hands alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

from celery import Celery

from broker.connect import SentinelAddress
from broker.message import BATCHES, CALLBACKS, TASK_NAME
from configs import BrokerSettings, Settings, load_settings

#: Options of kombu's Redis transport that name the keys of messages that a consumer has not acknowledged.
UNACKED_KEYS = ("unacked_key", "unacked_index_key", "unacked_mutex_key")


#: The tasks that we serve, and where.
SERVED = {TASK_NAME: "infer.<model>", CALLBACKS: CALLBACKS, BATCHES: BATCHES}


def make_app(settings: Settings, tasks: Sequence[str] = tuple(SERVED)) -> Celery:
    """A Celery application for these settings that knows these of our tasks."""
    app = Celery("sheaf", set_as_current=False)
    app.conf.update(_celery_settings(settings.broker, settings.api.result_ttl_s))
    for name in tasks:
        # Other applications of the process have tasks of their own.
        app.task(name=name, shared=False)(_served_elsewhere(name, SERVED[name]))
    return app


def _served_elsewhere(name: str, queue: str) -> Callable[..., NoReturn]:
    """Registered so that `inspect registered` and Flower know the task; calls are served by the drain."""

    def call(*_args: object, **_kwargs: object) -> NoReturn:
        raise RuntimeError(
            f"{name} is served from the queue {queue}: send it with queue={queue!r}, "
            "not to a queue of an ordinary Celery worker"
        )

    return call


def _celery_settings(broker: BrokerSettings, result_ttl_s: int) -> dict[str, Any]:
    url, options = _celery_url(broker.server_url)
    if broker.key_prefix:
        options["global_keyprefix"] = broker.key_prefix
    # Kombu's consumers give back whatever has lain under these keys for longer than their own `visibility_timeout`.
    # Under the stock names that would be other applications' tasks on this database, which may run longer than that.
    options |= {key: f"sheaf:{key.removesuffix('_key')}" for key in UNACKED_KEYS}
    options["socket_timeout"] = broker.read_timeout_s
    options["socket_keepalive"] = not url.startswith("unix")
    # Nothing else tells Celery of a connection that went silent while it listens.
    options["health_check_interval"] = broker.read_timeout_s
    return {
        "broker_url": url,
        "broker_transport_options": options,
        "result_backend": url,
        "result_backend_transport_options": options,
        "result_expires": result_ttl_s,
        "accept_content": ["json"],
        "task_serializer": "json",
        "result_serializer": "json",
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        # A server that is full or read-only for a while must not end the worker.
        "broker_channel_error_retry": True,
        # The drain's results come from its own store; a restart of Celery's connection must not cancel anything.
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_send_task_events": True,
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
        # Replies and events of tools that went away must not fill the server.
        "control_queue_ttl": 300.0,
        "control_queue_expires": 600.0,
        "event_queue_ttl": 5.0,
        "event_queue_expires": 60.0,
    }


def _celery_url(url: str) -> tuple[str, dict[str, Any]]:
    """Our URL in Celery's spelling, and the transport options that go with it."""
    if url.startswith("unix://"):
        return "redis+socket://" + url.removeprefix("unix://"), {}
    if not url.startswith("sentinel:"):
        return url, {}
    address = SentinelAddress.parse(url)
    login = ""
    if address.password is not None:
        login = f"{quote(address.username or '', safe='')}:{quote(address.password, safe='')}@"
    nodes = ";".join(f"sentinel://{login}{host}:{port}/{address.db}" for host, port in address.sentinels)
    return nodes, {"master_name": address.master}


def _app_of_environment() -> Celery:
    """For `celery -A workers.app`, which can hand over no settings: the file named by `SHEAF_CONFIG`, if any."""
    named = os.environ.get("SHEAF_CONFIG")
    return make_app(load_settings(Path(named) if named else None).settings)


def __getattr__(name: str) -> Celery:
    # Made on first use, so that importing this module reads no settings.
    if name in ("app", "celery"):
        app = globals()["app"] = globals()["celery"] = _app_of_environment()
        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
