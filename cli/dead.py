"""`sheaf dead`: look at messages that could not be run, give them another life, or throw them away."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import typer

from broker import queue_name
from broker.dead import DeadLetter, DeadLetters
from broker.message import CALLBACKS
from cli.lines import one_line
from cli.loading import loaded_settings
from cli.moments import moment
from cli.problems import CommandError
from configs import Settings

app = typer.Typer(no_args_is_help=True, help="Messages that could not be run.")

Model = Annotated[str | None, typer.Argument(help="Only this model's; everybody's without.")]
OneModel = Annotated[str, typer.Argument(help="The model whose letters these are; sheaf.callbacks for callbacks.")]
Number = Annotated[str, typer.Argument(help="A number or job id, as `sheaf dead list` shows it.")]
Numbers = Annotated[list[str] | None, typer.Argument(help="Numbers or job ids, as `sheaf dead list` shows them.")]
All = Annotated[bool, typer.Option("--all", help="All letters of this model.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

#: Most characters of a message that `show` prints without --json.
SHOWN = 10_000


@app.callback()
def _group() -> None:
    """Messages that could not be run, or whose worker was lost `broker.max_attempts` times.

    Each is kept with the reason until it is retried or purged here. Its caller has been told: the failure is
    its result.
    """


@app.command("list")
def list_letters(
    model: Model = None,
    limit: Annotated[int, typer.Option(min=1, help="Most letters per model, the newest first.")] = 20,
    as_json: Json = False,
) -> None:
    """List dead letters, the newest first."""
    settings = loaded_settings().settings
    with _open(settings) as dead:
        names = [*settings.models, CALLBACKS] if model is None else [model]
        views = [_view(letter) for name in names for letter in dead.newest(_queue(name), limit)]
        counts = {name: dead.count(_queue(name)) for name in names}
    if as_json:
        typer.echo(json.dumps(views, indent=2))
        return
    for view in views:
        fields = ("queue", "number", "buried_at", "job_id", "reason")
        typer.echo("  ".join(one_line(view[field] or "-") for field in fields))
    typer.echo(", ".join(f"{name}: {count}" for name, count in counts.items()) + " dead letters")


@app.command()
def show(
    model: OneModel, number: Annotated[str, typer.Argument(help="Number or job id.")], as_json: Json = False
) -> None:
    """Show one letter with its message."""
    with _open(loaded_settings().settings) as dead:
        [letter] = _chosen(dead, model, [number], everything=False)
    message = letter.message.decode("utf-8", "backslashreplace")
    if as_json:
        typer.echo(json.dumps({**_view(letter), "message": message}, indent=2))
        return
    for name, value in _view(letter).items():
        typer.echo(f"{name}: {one_line(value)}")
    typer.echo(f"message: {one_line(message[:SHOWN])}")
    if len(message) > SHOWN:
        typer.echo(f"… {len(message)} characters in all: --json prints them")


@app.command()
def retry(model: OneModel, numbers: Numbers = None, everything: All = False) -> None:
    """Put letters back on the queue, with no attempt counted; their stored failures go."""
    with _open(loaded_settings().settings) as dead:
        # The oldest first, so that they wait in the order in which they came.
        revived = sum(dead.revive(letter) for letter in reversed(_chosen(dead, model, numbers, everything)))
    typer.echo(f"{revived} put back on {_queue(model)}")


@app.command()
def purge(model: OneModel, numbers: Numbers = None, everything: All = False) -> None:
    """Throw letters away; stored failures stay."""
    with _open(loaded_settings().settings) as dead:
        purged = dead.purge(_chosen(dead, model, numbers, everything))
    typer.echo(f"{purged} thrown away")


def _queue(model: str) -> str:
    """The queue of a model; a queue's name, as `list` prints it, is taken as it is."""
    return model if model == CALLBACKS or model.startswith(queue_name("")) else queue_name(model)


def _open(settings: Settings) -> DeadLetters:
    broker = settings.broker
    return DeadLetters(broker.server_url, key_prefix=broker.key_prefix, read_timeout_s=broker.read_timeout_s)


def _chosen(dead: DeadLetters, model: str, numbers: Sequence[str] | None, everything: bool) -> list[DeadLetter]:
    """The letters that are meant, the newest first."""
    if everything == bool(numbers):
        raise CommandError("name letters by number or job id, or give --all")
    letters = dead.newest(_queue(model))
    if numbers is None or everything:
        return list(letters)
    chosen = [letter for letter in letters if letter.number in numbers or letter.job_id in numbers]
    for number in numbers:
        if not any(number in (letter.number, letter.job_id) for letter in chosen):
            raise CommandError(f"{_queue(model)} has no dead letter {number}: see `sheaf dead list {model}`")
    return chosen


def _view(letter: DeadLetter) -> dict[str, object]:
    return {
        "queue": letter.queue,
        "number": letter.number,
        "job_id": letter.job_id,
        "reason": letter.reason,
        "priority": letter.priority,
        "attempts": letter.attempts,
        "buried_at": moment(letter.buried_at),
    }
