"""Says when the whole service is ready: addresses, and a first request to paste."""

from __future__ import annotations

import asyncio
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
    pages = [f"{api}/readyz", *metrics]
    if settings.flower.enabled:
        pages.append(f"{flower}/healthcheck")
    for page in pages:
        while not _answers(page):
            time.sleep(LOOK_EVERY_S)
    failed, keys = asyncio.run(_asked(settings))
    in_force = settings.auth.mode == "keys" and keys > 0
    lines = [
        "",
        "Sheaf is ready.",
        *(f"  NOT served: {name}, {error}" for name, error in failed),
        f"  API docs  {api}/docs",
        f"  Flower    {flower}" if settings.flower.enabled else "  Flower    off (flower.enabled)",
        f"  Metrics   {', '.join([f'{api}/metrics', *metrics])}",
        f"  Broker    {_without_password(settings.broker.server_url)}",
        f"  Keys      {_who_may_call(settings, keys)}",
        "",
        "Try it:",
        f"  {first_request(api, settings, with_key=in_force)}",
        "",
    ]
    print("\n".join(lines), flush=True)


def first_request(api: str, settings: Settings, *, with_key: bool) -> str:
    """A command that submits a job and waits for it."""
    key = ' -H "Authorization: Bearer $SHEAF_KEY"' if with_key else ""
    model = "minilm" if "minilm" in settings.models else next(iter(settings.models))
    body = f'{{"model": "{model}", "input": "{_EXAMPLE_TEXT}"}}'
    return f"curl -s {api}/v1/jobs -H 'Content-Type: application/json' -H 'Prefer: wait=10'{key} -d '{body}'"


async def _asked(settings: Settings) -> tuple[list[tuple[str, str]], int]:
    """The models that no worker could load, with the reason; and how many keys there are."""
    from bulk.client import open_broker

    async with open_broker(settings) as broker:
        infos = [info for worker in await broker.overview.workers() for info in worker.models]
        keys = len(await broker.access.all())
    served = {info.name for info in infos if info.state != "failed"}
    failed = {info.name: str(info.error) for info in infos if info.name not in served}
    return sorted(failed.items()), keys


def _who_may_call(settings: Settings, keys: int) -> str:
    if settings.auth.mode == "none":
        return "none asked for (auth.mode): whoever reaches the API may call it"
    if not keys:
        return "none yet: only this machine may call the API; `sheaf keys create OWNER` makes one"
    return f"{keys} in force: requests send one as `Authorization: Bearer …`"


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
