"""Celery's thread pool with a batcher inside the process: each task waits for its row's outcome."""

from __future__ import annotations

import os
import queue
import threading
from concurrent.futures import Future

from celery import Celery

MAX_BATCH_SIZE = 64
MAX_WAIT_S = 0.005

app = Celery(broker=os.environ["BROKER_URL"], backend=os.environ["BROKER_URL"])
rows: queue.Queue[tuple[object, Future[object]]] = queue.Queue()


@app.task(name="sheaf.infer")
def infer(row: object) -> object:
    outcome: Future[object] = Future()
    rows.put((row, outcome))
    return outcome.result()


def run_batches() -> None:
    while True:
        batch = [rows.get()]
        try:
            while len(batch) < MAX_BATCH_SIZE:
                batch.append(rows.get(timeout=MAX_WAIT_S))
        except queue.Empty:
            pass
        for row, outcome in batch:
            outcome.set_result(row)


threading.Thread(target=run_batches, daemon=True).start()
