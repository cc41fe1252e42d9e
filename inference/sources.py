"""Where a model's files come from: a Python package, a folder, or a hub id. Weights are safetensors, code is ours."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from inference.errors import ModelLoadError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Source:
    """What `from_pretrained` takes. `folder` is None for a hub id."""

    location: str
    folder: Path | None

    def load_options(self) -> dict[str, object]:
        """Options for every `from_pretrained`: no remote code, and no network for files that are here."""
        return {"trust_remote_code": False, "local_files_only": self.folder is not None}


def find_source(model: str, source: str | None) -> Source:
    """`package:name/folder`, a path, or a hub id. Raises `ModelLoadError` when there is no such thing."""
    if source is None:
        raise ModelLoadError(model, "set `source` to package:NAME/FOLDER, a path or a hub id")
    if source.startswith("package:"):
        return _local(model, source, _in_package(model, source.removeprefix("package:")))
    path = Path(source).expanduser()
    if path.is_dir():
        return _local(model, source, path)
    # `models/x` looks like a hub id; with a folder `models` here it is meant as a path.
    meant_here = source.startswith((".", "/", "~", "models/")) or ("/" in source and path.parent.is_dir())
    if meant_here or not _HUB_ID.fullmatch(source):
        raise ModelLoadError(model, f"source {source!r}: there is no folder {path.absolute()}")
    return Source(source, None)


def _in_package(model: str, name: str) -> Path:
    package, _, folder = name.partition("/")
    spec = find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ModelLoadError(model, f"source package:{name}: the package {package!r} is not installed")
    return Path(spec.submodule_search_locations[0], folder)


def _local(model: str, source: str, folder: Path) -> Source:
    if not folder.is_dir():
        raise ModelLoadError(model, f"source {source}: no folder {folder}")
    if not any(folder.glob("*.safetensors")):
        raise ModelLoadError(model, f"source {source}: no *.safetensors in {folder}; other weight formats run code")
    return Source(str(folder), folder)
