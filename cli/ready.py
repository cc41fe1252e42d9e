"""Says when the whole service is ready: addresses, and a first request to paste."""

from __future__ import annotations

import json
import time
import urllib.request

from configs import Settings

#: Seconds between looks.
LOOK_EVERY_S = 0.25
#: What is asked of the example model, when it is there.
_EXAMPLE_TEXT = "Sheaves of grain, bound and carried together."


def announce_when_ready(settings: Settings, workers: int) -> None:
    """Wait, however long, until every part answers; then print where they are."""
    api = f"http://{_reachable(settings.api.host)}:{settings.api.port}"
    flower = f"http://{_reachable(settings.flower.host)}:{settings.flower.port}"
    metrics_ports = [settings.workers.metrics_port + index for index in range(workers)] + [settings.io.metrics_port]
    metrics = [f"http://{_reachable(settings.workers.metrics_host)}:{port}/metrics" for port in metrics_ports]
    pages = [f"{api}/readyz", f"{api}/metrics", *metrics]
    if settings.flower.enabled:
        pages.append(f"{flower}/healthcheck")
    for page in pages:
        while not _answers(page):
            time.sleep(LOOK_EVERY_S)
    lines = [
        "",
        "Sheaf is ready.",
        *(f"  NOT served: {name}, {error}" for name, error in _failed_models(api)),
        f"  API docs  {api}/docs",
        f"  Flower    {flower}" if settings.flower.enabled else "  Flower    off (flower.enabled)",
        f"  Metrics   {', '.join([f'{api}/metrics', *metrics])}",
        f"  Broker    {_without_password(settings.broker.server_url)}",
        "",
        "Try it:",
        f"  {first_request(api, settings)}",
        "",
    ]
    print("\n".join(lines), flush=True)


def first_request(api: str, settings: Settings) -> str:
    """A command that submits a job and waits for it."""
    model = "minilm" if "minilm" in settings.models else next(iter(settings.models))
    body = f'{{"model": "{model}", "input": "{_EXAMPLE_TEXT}"}}'
    return f"curl -s {api}/v1/jobs -H 'Content-Type: application/json' -H 'Prefer: wait=10' -d '{body}'"


def _failed_models(api: str) -> list[tuple[str, str]]:
    with urllib.request.urlopen(f"{api}/v1/models", timeout=5) as answer:  # noqa: S310  # our own page
        models = json.load(answer)["data"]
    return [(model["name"], model["error"]) for model in models if model["state"] == "failed"]


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310  # our own pages
            return bool(answer.status == 200)
    except OSError:
        return False


def _reachable(host: str) -> str:
    """Where a server that listens on `host` is reached from this machine."""
    if host in ("0.0.0.0", "::"):  # noqa: S104  # compared, not bound
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _without_password(url: str) -> str:
    head, at, tail = url.rpartition("@")
    return f"{head.partition('://')[0]}://***@{tail}" if at else url
