"""`sheaf webhooks`: look at deliveries, send them again, and hand out the secrets that sign them."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from broker.deliveries import MAX_LISTED, Attempt, Deliveries, Delivery, DeliveryState
from cli.keys import open_registry
from cli.lines import one_line
from cli.loading import loaded_settings
from cli.moments import moment
from cli.problems import CommandError
from configs import Settings
from webhooks import new_secret

app = typer.Typer(no_args_is_help=True, help="Deliveries to webhooks, and their secrets.")

Id = Annotated[str, typer.Argument(help="A delivery's id, msg_…, as `sheaf webhooks list` shows it.")]
Ids = Annotated[list[str] | None, typer.Argument(help="Ids of deliveries, msg_….")]
State = Annotated[DeliveryState | None, typer.Option("--state", help="Only those that are in this state.")]
Job = Annotated[str | None, typer.Option("--job", metavar="ID", help="Only those of this job.")]
Failed = Annotated[bool, typer.Option("--failed", help="All that are listed as failed.")]
Owner = Annotated[str, typer.Option("--owner", help="Whose jobs they are; nobody's in particular without.")]
Rotate = Annotated[bool, typer.Option("--rotate", help="Make a new one; the present one signs too for a while.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def _group() -> None:
    """Deliveries to webhooks, and the secrets that sign them.

    A delivery is one end of one job on its way to the address that its caller gave. It is listed once it was tried,
    and can be shown while it is put off before that.
    """


@app.command("list")
def list_deliveries(
    state: State = None,
    job: Job = None,
    limit: Annotated[int, typer.Option(min=1, help="Most deliveries, the newest first.")] = 20,
    as_json: Json = False,
) -> None:
    """List deliveries, those of the newest events first."""
    with _open(loaded_settings().settings) as log:
        chosen = [
            delivery
            for delivery in log.newest(limit if state is None and job is None else MAX_LISTED)
            if state in (None, delivery.state) and job in (None, delivery.notification.job_id)
        ][:limit]
    if as_json:
        typer.echo(json.dumps([_view(delivery) for delivery in chosen], indent=2))
        return
    for delivery in chosen:
        view = _view(delivery)
        last = _error(delivery.attempts[-1]) if delivery.attempts else None
        put_off = f"put off until {view['next_attempt_at']}: {view['put_off']}" if delivery.put_off else None
        fields = [view[name] for name in ("id", "created_at", "event", "state", "job_id", "url")]
        notes = [note for note in (f"{len(delivery.attempts)} attempts", last, put_off) if note]
        typer.echo("  ".join(map(one_line, [*fields, *notes])))


@app.command()
def show(delivery_id: Id, as_json: Json = False) -> None:
    """Show one delivery with its attempts and what is sent."""
    with _open(loaded_settings().settings) as log:
        delivery = log.get(delivery_id)
    if delivery is None:
        raise _unknown(delivery_id)
    if as_json:
        typer.echo(json.dumps({**_view(delivery), "payload": delivery.payload}, indent=2))
        return
    for name, value in _view(delivery).items():
        if name != "attempts":
            typer.echo(f"{name}: {'-' if value is None else one_line(value)}")
    for attempt in delivery.attempts:
        how = one_line(_error(attempt) or attempt.status)
        typer.echo(f"attempt: {moment(attempt.at)}  {attempt.duration_ms:g} ms  {how}")
    typer.echo(f"payload: {one_line(delivery.payload)}")


@app.command()
def resend(delivery_ids: Ids = None, failed: Failed = False) -> None:
    """Send deliveries again, at once and with all attempts; under the same webhook-id and with the same payload."""
    if failed == bool(delivery_ids):
        raise CommandError("name deliveries by their id, or give --failed")
    settings = loaded_settings().settings
    with _open(settings) as log:
        names = delivery_ids or [one.id for one in log.newest(MAX_LISTED) if one.state is DeliveryState.FAILED]
        for name in names:
            if log.resend(name, settings.webhooks.keep_s) is None:
                raise _unknown(name)
    typer.echo(f"{len(names)} queued again")


@app.command()
def secret(owner: Owner = "", rotate: Rotate = False, as_json: Json = False) -> None:
    """Print the secret that signs the webhooks of an owner's jobs; it is made when there is none.

    Owners are those of keys. Whoever has lost their last key keeps the secret.
    """
    settings = loaded_settings().settings
    with _open(settings) as log:
        if not (owner == "" or log.secrets.known(owner) or _has_key(settings, owner)):
            raise CommandError(
                f"there is no owner {owner!r}: see `sheaf keys list`; jobs of nobody in particular go without --owner"
            )
        secrets = log.secrets.rotate(owner) if rotate else log.secrets.of([owner])[0]
    in_use = secrets.in_use(time.time(), settings.webhooks.previous_secret_s)
    previous = in_use[1] if len(in_use) > 1 else None
    until = None
    if previous is not None and secrets.rotated_at is not None:
        until = moment(secrets.rotated_at + settings.webhooks.previous_secret_s)
    if as_json:
        view = {"owner": owner, "current": secrets.current, "previous": previous, "previous_signs_until": until}
        typer.echo(json.dumps(view, indent=2))
        return
    typer.echo(secrets.current)
    if previous is not None:
        typer.echo(f"until {until} the previous one signs too: {previous}", err=True)


def _open(settings: Settings) -> Deliveries:
    broker = settings.broker
    return Deliveries(
        broker.server_url, new_secret=new_secret, key_prefix=broker.key_prefix, read_timeout_s=broker.read_timeout_s
    )


def _has_key(settings: Settings, owner: str) -> bool:
    with open_registry(settings) as keys:
        return any(key.owner == owner for key in keys.all())


def _unknown(delivery_id: str) -> CommandError:
    return CommandError(f"there is no delivery {delivery_id}: see `sheaf webhooks list`; old ones are not kept")


def _view(delivery: Delivery) -> dict[str, object]:
    told = delivery.notification
    due = delivery.next_attempt_at
    return {
        "id": told.id,
        "job_id": told.job_id,
        "event": told.event.value,
        "url": told.url,
        "owner": told.owner,
        "request_id": told.request_id,
        "state": delivery.state.value,
        "created_at": moment(told.at),
        "next_attempt_at": None if due is None else moment(due),
        "put_off": None if delivery.put_off is None else delivery.put_off.reason,
        "attempts": [_attempt(attempt) for attempt in delivery.attempts],
    }


def _attempt(attempt: Attempt) -> dict[str, object]:
    return {
        "at": moment(attempt.at),
        "duration_ms": attempt.duration_ms,
        "status": attempt.status,
        "error": attempt.error,
        "detail": attempt.detail,
    }


def _error(attempt: Attempt) -> str | None:
    """With what others say of it."""
    return attempt.error if attempt.detail is None else f"{attempt.error}: {attempt.detail}"
