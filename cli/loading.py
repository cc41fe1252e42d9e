"""The settings of this process."""

from __future__ import annotations

import os
from pathlib import Path

from configs import LoadedSettings, load_settings

#: Names the file given with `--config`, for this process and its children.
CONFIG_VARIABLE = "SHEAF_CONFIG"


def loaded_settings() -> LoadedSettings:
    """Raises `configs.SettingsError`."""
    named = os.environ.get(CONFIG_VARIABLE)
    return load_settings(Path(named) if named else None)
