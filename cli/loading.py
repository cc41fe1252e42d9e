"""The settings of this process."""

from __future__ import annotations

import os
from pathlib import Path

from cli.problems import CommandError
from configs import LoadedSettings, ModelSettings, Settings, load_settings

#: Names the file given with `--config`, for this process and its children.
CONFIG_VARIABLE = "SHEAF_CONFIG"


def loaded_settings() -> LoadedSettings:
    """Raises `configs.SettingsError`."""
    named = os.environ.get(CONFIG_VARIABLE)
    return load_settings(Path(named) if named else None)


def known_model(settings: Settings, name: str) -> ModelSettings:
    """Raises `CommandError` for a name that is no model's."""
    if name not in settings.models:
        raise CommandError(f"there is no model {name}: the settings name {', '.join(settings.models)}")
    return settings.models[name]
