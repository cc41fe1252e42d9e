"""A shop's own Celery application, which shares the server with Sheaf and knows nothing of it."""

from __future__ import annotations

import os
import time

from celery import Celery

app = Celery("shop", broker=os.environ["SHOP_URL"], backend=os.environ["SHOP_URL"])
app.conf.broker_transport_options = {
    "visibility_timeout": float(os.environ["SHOP_VISIBILITY_S"]),
    "unacked_restore_interval": 0.2,
    "unacked_restore_throttle": 1,
}
app.conf.broker_connection_retry_on_startup = True


@app.task(name="shop.add")
def add(left: int, right: int) -> int:
    return left + right


@app.task(name="shop.slow", acks_late=True)
def slow(seconds: float, journal: str) -> str:
    """Notes each of its runs in a file; ends early when there is one of that name with the suffix `.end`."""
    with open(journal, "a") as file:
        file.write("run\n")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not os.path.exists(journal + ".end"):
        time.sleep(0.05)
    return "slept"
