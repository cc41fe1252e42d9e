"""`sheaf config`: what the settings are and where each value came from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated
from urllib.parse import urlsplit

import typer

from cli.loading import loaded_settings

app = typer.Typer(no_args_is_help=True, help="Look at the settings.")

_HIDDEN = "**********"
#: Settings whose values may hold a password.
_URLS = (("broker", "url"), ("files", "storage"))


@app.callback()
def _group() -> None:
    """Look at the settings."""


@app.command()
def show(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: one object a value, with key, value, origin.")
    ] = False,
) -> None:
    """Print every setting, its value, and the layer that it came from.

    Layers, each above the one before: base.yaml, {SHEAF_ENV}.yaml, the file of --config, and the environment:
    SHEAF_API__PORT=9000 sets api.port. Passwords are not printed.
    """
    loaded = loaded_settings()
    rows = [
        {"key": ".".join(key), "value": _shown(key, value), "origin": loaded.origin(key)}
        for key, value in _leaves(loaded.settings.model_dump(mode="json"), ())
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    typer.echo(f"# SHEAF_ENV={loaded.environment}")
    texts = [(row["key"], json.dumps(row["value"]), row["origin"]) for row in rows]
    width = max(len(str(key)) + len(value) for key, value, _ in texts) + 2
    for key, value, origin in texts:
        typer.echo(f"{f'{key}: {value}':<{width}}  # {origin}")


def _leaves(tree: dict[str, object], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name), value


def _shown(key: tuple[str, ...], value: object) -> object:
    if key in _URLS and isinstance(value, str) and urlsplit(value).password:
        return value.replace(f":{urlsplit(value).password}@", f":{_HIDDEN}@")
    return value
