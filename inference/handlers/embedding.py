"""Sentence embeddings from a transformer encoder: tokens pooled to one vector a text.

Pooling as in Reimers and Gurevych, "Sentence-BERT", 2019: the mean of the last hidden states over the real tokens, or
the first token's state; then scaled to unit length, so that a dot product is a cosine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModel, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from inference.errors import InvalidInput, ModelLoadError
from inference.giving_way import give_way_between_layers
from inference.handler import Encoded, Handler, ModelSpec, RowError
from inference.sources import Source, find_source

#: Tokenizers without a limit of their own report a number above this.
NO_LIMIT = 1_000_000

_OPTIONS = {"pooling", "normalize"}
_POOLINGS = ("mean", "cls")


class Embedding(Handler):
    """Text in, `float32[dim]` out. Options: `pooling` (mean or cls; default: what the model's files say, else mean) and
    `normalize` (default true).
    """

    def load(self, spec: ModelSpec, device: str, dtype: object) -> None:
        source = find_source(spec.name, spec.source)
        self._pooling, self._normalize = _options(spec, source)
        options = source.load_options()
        disable_progress_bar()
        tokenizer = AutoTokenizer.from_pretrained(source.location, use_fast=True, **options)
        if not tokenizer.is_fast:
            raise ModelLoadError(spec.name, "it has no fast tokenizer (tokenizer.json)")
        self._model = AutoModel.from_pretrained(source.location, dtype=dtype, use_safetensors=True, **options)
        self._model.eval().to(device)
        give_way_between_layers(self._model)
        self._device = device
        self._pad_id = int(tokenizer.pad_token_id or 0)
        self._refuse = spec.over_length == "refuse"
        self._max_length = _max_length(spec, source, tokenizer.model_max_length, self._model.config)
        self._tokenizer = tokenizer.backend_tokenizer
        self._tokenizer.no_padding()
        if self._refuse:
            self._tokenizer.no_truncation()
        else:
            self._tokenizer.enable_truncation(self._max_length)

    def preprocess(self, rows: Sequence[object]) -> Sequence[Encoded | RowError]:
        for row in rows:
            if not isinstance(row, str):
                raise InvalidInput(f"the input must be a text, not {type(row).__name__}")
        return [self._encoded(encoding.ids) for encoding in self._tokenizer.encode_batch_fast(rows)]

    def _encoded(self, ids: list[int]) -> Encoded | RowError:
        if self._refuse and len(ids) > self._max_length:
            error = InvalidInput(f"the text has {len(ids)} tokens, the model takes {self._max_length}: shorten it")
            return RowError.of(error, with_traceback=False)
        return Encoded(ids, len(ids))

    def collate(self, batch: Sequence[Encoded]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and attention mask, both `int64[rows, longest]`, on the device."""
        longest = max(row.tokens for row in batch)
        ids = np.full((len(batch), longest), self._pad_id, dtype=np.int64)
        mask = np.zeros((len(batch), longest), dtype=np.int64)
        for index, row in enumerate(batch):
            ids[index, : row.tokens] = cast("list[int]", row.data)
            mask[index, : row.tokens] = 1
        return self._on_device(ids), self._on_device(mask)

    def _on_device(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._device == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def infer(self, batch: tuple[torch.Tensor, torch.Tensor]) -> object:
        """`float32[rows, dim]` on the CPU."""
        ids, mask = batch
        states = self._model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        if self._pooling == "cls":
            pooled = states[:, 0]
        else:
            weights = mask.unsqueeze(-1).to(states.dtype)
            pooled = (states * weights).sum(1) / weights.sum(1).clamp(min=1.0)
        if self._normalize:
            pooled = torch.nn.functional.normalize(pooled, dim=1)
        return pooled.cpu()

    def postprocess(self, raw: object) -> Sequence[object]:
        assert isinstance(raw, torch.Tensor)
        return list(raw.numpy())

    def example(self) -> object:
        return "The quick brown fox jumps over the lazy dog."


def _options(spec: ModelSpec, source: Source) -> tuple[str, bool]:
    unknown = set(spec.options) - _OPTIONS
    if unknown:
        raise ModelLoadError(
            spec.name, f"unknown options {', '.join(sorted(unknown))}: an embedding has {', '.join(sorted(_OPTIONS))}"
        )
    pooling = spec.options.get("pooling") or _pooling_of_files(source)
    if pooling not in _POOLINGS:
        raise ModelLoadError(spec.name, f"pooling {pooling!r} is unknown: it is one of {', '.join(_POOLINGS)}")
    normalize = spec.options.get("normalize", True)
    if not isinstance(normalize, bool):
        raise ModelLoadError(spec.name, f"option normalize must be true or false, not {normalize!r}")
    return str(pooling), normalize


def _pooling_of_files(source: Source) -> str:
    """What sentence-transformers wrote beside the weights; mean when there is nothing."""
    config = _json(source.folder, "1_Pooling/config.json")
    return "cls" if config.get("pooling_mode_cls_token") else "mean"


def _max_length(spec: ModelSpec, source: Source, tokenizer_limit: int, config: object) -> int:
    """Longest row in tokens: the settings', but not above what the model has positions for."""
    positions = getattr(config, "max_position_embeddings", None)
    if spec.max_length is not None:
        if positions is not None and spec.max_length > positions:
            raise ModelLoadError(spec.name, f"max_length {spec.max_length} is over the model's {positions} positions")
        return spec.max_length
    own = _json(source.folder, "sentence_bert_config.json").get("max_seq_length")
    limits = (own, tokenizer_limit if tokenizer_limit < NO_LIMIT else None, positions)
    known = next((limit for limit in limits if isinstance(limit, int)), None)
    if known is None:
        raise ModelLoadError(spec.name, "its files name no longest input: set max_length")
    return known


def _json(folder: Path | None, name: str) -> dict[str, object]:
    path = folder / name if folder is not None else None
    if path is None or not path.is_file():
        return {}
    content = json.loads(path.read_text())
    return content if isinstance(content, dict) else {}
