"""The most that the framework can do: an endpoint that does nothing."""

from fastapi import FastAPI

app = FastAPI()


@app.post("/v1/jobs", status_code=202)
async def submit() -> dict[str, bool]:
    return {"ok": True}
