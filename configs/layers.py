"""From layers to settings: `base.yaml` <- `{SHEAF_ENV}.yaml` <- `--config FILE` <- `SHEAF_<SECTION>__<KEY>`.

Mappings are merged key by key, anything else is replaced. A model whose entry is `null` in a later layer is taken out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from configs.settings import ModelSettings, Settings

_FOLDER = Path(__file__).parent
_PREFIX = "SHEAF_"

Key = tuple[str, ...]


class SettingsError(Exception):
    """The settings cannot be used; one line per fault, each naming the key, where it came from, and what to do."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings, and for each value the name of the layer that it came from."""

    settings: Settings
    environment: str
    origins: Mapping[Key, str]

    def origin(self, key: Key) -> str:
        """The layer of a value, of the nearest mapping above it, or of what a mapping holds; else `default`."""
        for end in range(len(key), 0, -1):
            if key[:end] in self.origins:
                return self.origins[key[:end]]
        return next((layer for known, layer in self.origins.items() if known[: len(key)] == key), "default")


def load_settings(file: Path | None = None, environ: Mapping[str, str] | None = None) -> LoadedSettings:
    """Read all layers. Raises `SettingsError`. `environ` defaults to the process' environment."""
    environ = os.environ if environ is None else environ
    environment = environ.get("SHEAF_ENV", "dev")
    tree: dict[str, Any] = {}
    origins: dict[Key, str] = {}
    for name, layer in _layers(environment, file, environ):
        _merge(tree, layer, name, origins, ())
    models = tree.get("models")
    if isinstance(models, dict):
        tree["models"] = {name: model for name, model in models.items() if model is not None}
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        loaded = LoadedSettings(Settings.model_construct(), environment, origins)
        raise SettingsError([_fault(detail, loaded) for detail in error.errors()]) from None
    return LoadedSettings(settings, environment, origins)


def _layers(
    environment: str, file: Path | None, environ: Mapping[str, str]
) -> Iterator[tuple[str, Mapping[str, object]]]:
    yield "base.yaml", _read(_FOLDER / "base.yaml")
    own = _FOLDER / f"{environment}.yaml"
    if not environment.isidentifier() or not own.is_file():
        known = sorted(path.stem for path in _FOLDER.glob("*.yaml") if path.stem != "base")
        raise SettingsError([f"SHEAF_ENV={environment!r} is unknown: it is one of {', '.join(known)}"])
    yield own.name, _read(own)
    if file is not None:
        yield str(file), _read(file)
    for name in sorted(environ):
        if name.startswith(_PREFIX) and "__" in name:
            yield name, _nested(name, environ[name])


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping; YAML's own readers take the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise yaml.YAMLError(f"the key {key!r} stands there twice, again in line {line}")
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read(path: Path) -> Mapping[str, object]:
    try:
        content = yaml.load(path.read_text(), _Loader)  # noqa: S506  # a safe loader
    except OSError as error:
        raise SettingsError([f"{path}: {error.strerror}"]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError([f"{path} is not YAML: {' '.join(str(error).split())}"]) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError([f"{path}: it must hold a mapping of sections, such as `api: {{port: 8000}}`"])
    return content


def _nested(variable: str, text: str) -> Mapping[str, object]:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    for part in reversed(variable.removeprefix(_PREFIX).lower().split("__")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def _merge(tree: dict[str, Any], layer: Mapping[str, object], origin: str, origins: dict[Key, str], above: Key) -> None:
    for raw_name, value in layer.items():
        name = str(raw_name)
        key = (*above, name)
        below = tree.get(name)
        if isinstance(value, dict) and (value or isinstance(below, dict)):
            if not isinstance(below, dict):
                below = tree[name] = {}
            _merge(below, value, origin, origins, key)
        else:
            tree[name] = value
            for known in [known for known in origins if known[: len(key)] == key]:
                del origins[known]
            origins[key] = origin


def _fault(detail: ErrorDetails, loaded: LoadedSettings) -> str:
    # pydantic marks a fault in a mapping's key, not in its value, with one more step.
    key = tuple(str(part) for part in detail["loc"] if part != "[key]")
    where = f"{'.'.join(key) or 'settings'}"
    if key:
        where += f" (from {loaded.origin(key)})"
    if detail["type"] == "extra_forbidden":
        near = get_close_matches(key[-1], _known(key[:-1]), n=1, cutoff=0.4)
        hint = f"did you mean {'.'.join((*key[:-1], near[0]))}?" if near else f"known: {', '.join(_known(key[:-1]))}"
        return f"{where}: unknown key; {hint}"
    message = detail["msg"].removeprefix("Value error, ")
    value = detail["input"]
    secret = "basic_auth" in key or key == ("broker", "url")
    shown = "" if isinstance(value, (dict, BaseModel)) or secret else f", not {value!r}"
    return f"{where}: {message}{shown}"


def _known(above: Key) -> list[str]:
    """The keys that may stand below this one."""
    if above[:1] == ("models",) and len(above) > 1:
        return list(ModelSettings.model_fields)
    section = Settings.model_fields[above[0]].annotation if above else Settings
    return list(section.model_fields) if isinstance(section, type) and issubclass(section, BaseModel) else []
