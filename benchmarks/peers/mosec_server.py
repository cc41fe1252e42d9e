"""mosec as its documentation shows dynamic batching: one worker, which also tokenizes."""

from __future__ import annotations

import numpy as np
import orjson
from minilm import MAX_BATCH_SIZE, MAX_WAIT_MS, MiniLM
from mosec import Server, Worker


class Embedding(Worker):
    def __init__(self) -> None:
        super().__init__()
        self._model = MiniLM()

    def deserialize(self, data: bytes) -> str:
        return orjson.loads(data)["input"]

    def forward(self, data: list[str]) -> list[np.ndarray]:
        return list(self._model.embed(data))

    def serialize(self, data: np.ndarray) -> bytes:
        return orjson.dumps({"output": data}, option=orjson.OPT_SERIALIZE_NUMPY)


if __name__ == "__main__":
    server = Server()
    server.append_worker(Embedding, max_batch_size=MAX_BATCH_SIZE, max_wait_time=MAX_WAIT_MS)
    server.run()
