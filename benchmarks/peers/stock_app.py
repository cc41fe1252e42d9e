"""A stock Celery worker with a null task."""

from __future__ import annotations

import os

from celery import Celery

app = Celery(broker=os.environ["BROKER_URL"], backend=os.environ["BROKER_URL"])


@app.task(name="sheaf.infer")
def infer(row: object) -> object:
    return row
