"""The Celery application of a shop that uses Sheaf: its own tasks, on its own queue, with nothing of ours."""

from __future__ import annotations

import os

from celery import Celery

app = Celery("shop", broker=os.environ.get("SHOP_URL"), backend=os.environ.get("SHOP_URL"))
app.conf.task_default_queue = "shop"


@app.task(name="shop.shout")
def shout(value: object) -> str:
    return f"{value}!"


@app.task(name="shop.join")
def join(values: list[object]) -> str:
    return "+".join(str(value) for value in values)


@app.task(name="shop.note_failure")
def note_failure(failed_id: str) -> str:
    return f"noted {failed_id}"
