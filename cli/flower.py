"""Flower as `sheaf flower` runs it: `/metrics`, which names workers and tasks, asks for what its other pages ask for.

`/healthcheck` stays open, for probes: it says no more than OK.
"""

from __future__ import annotations

from flower.__main__ import main
from flower.views.monitor import Metrics
from tornado.web import authenticated

if __name__ == "__main__":
    Metrics.get = authenticated(Metrics.get)
    main()
