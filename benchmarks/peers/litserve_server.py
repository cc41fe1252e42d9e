"""LitServe as its documentation shows dynamic batching: one worker, which also tokenizes.

The answer is made into JSON by orjson instead of FastAPI's encoder, which takes longer for 384 numbers.
"""

from __future__ import annotations

import os

import numpy as np
import orjson
from fastapi import Response
from litserve import LitAPI, LitServer
from minilm import MAX_BATCH_SIZE, MAX_WAIT_MS, REQUEST_TIMEOUT_S, MiniLM


class Embedding(LitAPI):
    def setup(self, device: str) -> None:
        self._model = MiniLM()

    def decode_request(self, request: dict) -> str:
        return request["input"]

    def batch(self, inputs: list[str]) -> list[str]:
        return inputs

    def predict(self, x: list[str]) -> np.ndarray:
        return self._model.embed(x)

    def unbatch(self, output: np.ndarray) -> list[np.ndarray]:
        return list(output)

    def encode_response(self, output: np.ndarray) -> Response:
        body = orjson.dumps({"output": output}, option=orjson.OPT_SERIALIZE_NUMPY)
        return Response(body, media_type="application/json")


if __name__ == "__main__":
    api = Embedding(max_batch_size=MAX_BATCH_SIZE, batch_timeout=MAX_WAIT_MS / 1e3, api_path="/inference")
    server = LitServer(
        api, accelerator="cpu", workers_per_device=1, timeout=REQUEST_TIMEOUT_S, fast_queue=False, track_requests=False
    )
    server.run(host="127.0.0.1", port=int(os.environ["PORT"]), generate_client_file=False, log_level="warning")
