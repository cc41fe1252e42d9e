"""Settings: YAML layers and the environment, merged, typed and checked once, at the entry point."""

from configs.files import FileSettings
from configs.layers import LoadedSettings, SettingsError, load_settings
from configs.settings import (
    ApiSettings,
    AuthSettings,
    BrokerSettings,
    FlowerSettings,
    LoggingSettings,
    ModelSettings,
    Settings,
    WorkerSettings,
)

__all__ = [
    "ApiSettings",
    "AuthSettings",
    "BrokerSettings",
    "FileSettings",
    "FlowerSettings",
    "LoadedSettings",
    "LoggingSettings",
    "ModelSettings",
    "Settings",
    "SettingsError",
    "WorkerSettings",
    "load_settings",
]
