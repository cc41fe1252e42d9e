"""`sheaf keys`: who may call the API."""

from __future__ import annotations

import json
import re
import time
from typing import Annotated

import typer

from broker import EVENTS, AccessKey, KeyRegistry, Rate, Scope, Webhook
from broker.access import issue
from cli.loading import loaded_settings
from cli.moments import moment
from cli.problems import CommandError
from configs import Settings
from webhooks import Refused

app = typer.Typer(no_args_is_help=True, help="Who may call the API.")

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

PRIORITIES = ("high", "normal", "low")
_PERIODS = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400}
_RATE = re.compile(rf"(\d+)/({'|'.join(_PERIODS)})")
_DURATION = re.compile(r"(\d+)([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


@app.callback()
def _group() -> None:
    """Who may call the API.

    As soon as there is a key, every request needs one. The broker keeps a hash of each.
    """


@app.command()
def create(
    owner: Annotated[str, typer.Argument(help="Whose jobs it submits and reads; keys of one owner see the same jobs.")],
    scopes: Annotated[
        str, typer.Option(help="Of submit, read, admin (everything, with everybody's jobs), metrics.")
    ] = "submit,read",
    priorities: Annotated[str, typer.Option(help="What it may submit with.")] = ",".join(PRIORITIES),
    rate: Annotated[
        str | None, typer.Option(metavar="N/second|minute|hour|day", help="Jobs that it may submit in that time.")
    ] = None,
    max_in_flight: Annotated[int | None, typer.Option(min=1, help="Jobs of it that have not ended.")] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="90d", help="After so many s, m, h or d it opens nothing.")
    ] = None,
    webhook_url: Annotated[
        str | None, typer.Option(metavar="https://…", help="Told of the end of each job that names no webhook itself.")
    ] = None,
    webhook_events: Annotated[
        str | None, typer.Option(metavar=",".join(EVENTS), help="The ends to tell of; all without it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a key and print it. It is shown this once."""
    if not _OWNER.fullmatch(owner):
        raise CommandError(f"{owner!r} is no owner: use up to 64 letters, digits and . _ @ -, a letter or digit first")
    settings = loaded_settings().settings
    text, key = issue(
        owner,
        scopes=[Scope(name) for name in _chosen(scopes, "scope", tuple(Scope))],
        priorities=_chosen(priorities, "priority", PRIORITIES),
        rate=None if rate is None else _rate(rate),
        max_in_flight=max_in_flight,
        expires_at=None if expires is None else time.time() + _seconds(expires),
        webhook=_webhook(webhook_url, webhook_events, owner, settings),
    )
    with open_registry(settings) as keys:
        keys.add(key)
    if as_json:
        typer.echo(json.dumps({**_view(key), "key": text}, indent=2))
    else:
        typer.echo(
            f"{text}\n\nKeep it: it is not shown again. Requests send it as `Authorization: Bearer {key.shown}`."
        )


@app.command("list")
def list_keys(as_json: Json = False) -> None:
    """List the keys, the oldest first, as far as they may be known."""
    with open_registry(loaded_settings().settings) as keys:
        views = [_view(key) for key in keys.all()]
    if as_json:
        typer.echo(json.dumps(views, indent=2))
        return
    for view in views:
        typer.echo("  ".join(f"{name}={_shown(value)}" for name, value in view.items() if value is not None))
    if not views:
        typer.echo("There are no keys: everybody on this machine may call the API, which listens on loopback only.")


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="Its id, as `sheaf keys list` shows it.")],
    last: Annotated[
        bool, typer.Option("--last", help="Also the last one, after which an API on loopback lets everybody in.")
    ] = False,
) -> None:
    """Make a key open nothing any more, within a second. Its owner's jobs stay."""
    wanted = key_id.removeprefix("sheaf_").partition("_")[0]
    with open_registry(loaded_settings().settings) as keys:
        if not last and [key.id for key in keys.all()] == [wanted]:
            raise CommandError(
                "it is the last key, and without any an API on loopback lets everybody in: create another first, "
                "or give --last"
            )
        if not keys.revoke(wanted):
            raise CommandError(f"there is no key {key_id}: see `sheaf keys list`")
        left = len(keys.all())
    typer.echo("Revoked." if left else "Revoked. It was the last one: an API on loopback lets everybody in now.")


def open_registry(settings: Settings) -> KeyRegistry:
    """All keys there are."""
    broker = settings.broker
    return KeyRegistry(broker.server_url, key_prefix=broker.key_prefix, read_timeout_s=broker.read_timeout_s)


def _chosen(text: str, what: str, known: tuple[str, ...]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise CommandError(f"{name!r} is no {what}: it is one of {', '.join(known)}")
    if not names:
        raise CommandError(f"name at least one {what}: {', '.join(known)}")
    return list(dict.fromkeys(names))


def _webhook(url: str | None, events: str | None, owner: str, settings: Settings) -> Webhook | None:
    if url is None:
        if events is not None:
            raise CommandError("--webhook-events are of --webhook-url: give that too")
        return None
    try:
        settings.webhooks.policy.target(url)
    except Refused as error:
        raise CommandError(f"--webhook-url: {error}") from None
    names = list(EVENTS) if events is None else _chosen(events, "event", tuple(EVENTS))
    return Webhook(url, tuple(EVENTS[name] for name in names), owner)


def _rate(text: str) -> Rate:
    found = _RATE.fullmatch(text)
    if not found or not int(found[1]):
        raise CommandError(f"{text!r} is no rate: write it as 100/minute, with {', '.join(_PERIODS)}")
    return Rate(int(found[1]), _PERIODS[found[2]])


def _seconds(text: str) -> int:
    found = _DURATION.fullmatch(text)
    if not found or not int(found[1]):
        raise CommandError(f"{text!r} is no duration: write it as 90d, with s, m, h or d")
    return int(found[1]) * _UNITS[found[2]]


def _view(key: AccessKey) -> dict[str, object]:
    return {
        "id": key.id,
        "owner": key.owner,
        "scopes": list(key.scopes),
        "priorities": list(key.priorities),
        "rate": None if key.rate is None else f"{key.rate.count}/{_period(key.rate)}",
        "max_in_flight": key.max_in_flight,
        "webhook": None if key.webhook is None else key.webhook.url,
        "webhook_events": None if key.webhook is None else [event.value for event in key.webhook.events],
        "created_at": moment(key.created_at),
        "expires_at": None if key.expires_at is None else moment(key.expires_at),
    }


def _period(rate: Rate) -> str:
    return next((name for name, seconds in _PERIODS.items() if seconds == rate.period_s), f"{rate.period_s:g}s")


def _shown(value: object) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)
