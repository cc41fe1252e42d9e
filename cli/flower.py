"""Flower as `sheaf flower` runs it: `/metrics`, which names workers and tasks, asks for what its other pages ask for.

Without a password it answers to no name but this machine's own, and lets no web page read it in a visitor's browser.

`/healthcheck` stays open, for probes: it says no more than OK.
"""

from __future__ import annotations

from typing import Any

from flower.__main__ import main
from flower.app import Flower
from flower.views import BaseHandler
from flower.views.monitor import Metrics
from tornado.httputil import HTTPMessageDelegate, HTTPServerRequest
from tornado.web import RequestHandler, authenticated

from api.hosts import is_address

_set_default_headers = BaseHandler.set_default_headers
_find_handler = Flower.find_handler


class _Refusal(RequestHandler):
    """Answers whoever calls an open Flower by a name."""

    def prepare(self) -> None:
        self.set_status(421)
        self.set_header("content-type", "text/plain; charset=utf-8")
        self.finish(
            "Without a password Flower answers to its address only, such as 127.0.0.1: call it by that, or set "
            "flower.basic_auth.\n"
        )


def _share_with_nobody(handler: RequestHandler) -> None:
    """Without a password Flower lets the pages of every other server read its own."""
    _set_default_headers(handler)
    for name in ("Origin", "Headers", "Methods"):
        handler.clear_header(f"Access-Control-Allow-{name}")


def _find_guarded(app: Any, request: HTTPServerRequest, **given: object) -> HTTPMessageDelegate:
    """A web page may let its own name point at this machine, and would then be one of Flower's own."""
    guarded: HTTPMessageDelegate
    if app.options.basic_auth or app.options.auth or is_address(request.host):
        guarded = _find_handler(app, request, **given)
    else:
        guarded = app.get_handler_delegate(request, _Refusal)
    return guarded


if __name__ == "__main__":
    Metrics.get = authenticated(Metrics.get)
    BaseHandler.set_default_headers = _share_with_nobody
    Flower.find_handler = _find_guarded
    main()
