"""Headers of a request, read as they came: a submit looks at eight, and a search that builds and raises costs more."""

from __future__ import annotations

from starlette.requests import Request


def header(request: Request, name: bytes) -> str | None:
    """The first header of this name, in lower case; None when there is none."""
    for known, value in request.scope["headers"]:
        if known == name:
            text: str = value.decode("latin-1")
            return text
    return None
