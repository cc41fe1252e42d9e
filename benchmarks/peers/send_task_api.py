"""The usual way: a FastAPI endpoint that calls Celery's `send_task`."""

from __future__ import annotations

import os

from celery import Celery
from fastapi import FastAPI
from pydantic import BaseModel

celery = Celery(broker=os.environ["BROKER_URL"], backend=os.environ["BROKER_URL"])
app = FastAPI()


class JobRequest(BaseModel):
    model: str
    input: str


@app.post("/v1/jobs", status_code=202)
async def submit(job: JobRequest) -> dict[str, str]:
    return {"id": celery.send_task("sheaf.infer", args=[job.input], queue=f"infer.{job.model}").id}
