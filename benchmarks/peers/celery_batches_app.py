"""celery-batches as its documentation shows it: 64 calls at a time, a null model, each result stored.

Runs in an environment of its own, with Celery 5.6.
"""

import os

from celery import Celery
from celery_batches import Batches

app = Celery(broker=os.environ["BROKER_URL"], backend=os.environ["BROKER_URL"])


@app.task(name="sheaf.infer", base=Batches, flush_every=64, flush_interval=0.05)
def infer(requests):
    outputs = [request.args[0] for request in requests]
    for request, output in zip(requests, outputs, strict=True):
        app.backend.mark_as_done(request.id, output, request=request)
