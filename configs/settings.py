"""The typed settings. Values only: where they come from is `configs.layers`' business.

Relations between values are checked here too, so that no process starts on settings that cannot work together.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from configs.batches import BatchSettings
from configs.files import FileSettings
from configs.webhooks import WebhookSettings

Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0)]

#: Seconds. The server answers a worker that waits at an empty queue only after `workers.lane.WAIT_S`.
MIN_READ_TIMEOUT_S = 2.0

MODEL_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_DEVICES = re.compile(r"auto|cpu|\d+(,\d+)*")


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)


class BrokerSettings(_Section):
    #: `embedded`, or the URL of a Redis-protocol server.
    url: str = "embedded"
    embedded_port: Port = 6380
    #: Where the embedded server keeps its append-only file; relative to the working directory.
    data_dir: Path = Path("var/valkey")
    #: When the embedded server's file is forced to disk. `everysec`: what it accepted in the last second or two is lost
    #: with the machine's power, or with a server that is killed while its disk is slow. `always`: nothing ever is, and
    #: each write costs a flush of the disk.
    embedded_fsync: Literal["everysec", "always"] = "everysec"
    #: Put before every key, so that several installations can share a server.
    key_prefix: str = ""
    lease_s: Annotated[float, Field(ge=0.3)] = 30.0
    max_attempts: Annotated[int, Field(ge=1)] = 3
    #: Jobs that may wait per model; 0 for no limit.
    max_queue_depth: Annotated[int, Field(ge=0)] = 100_000
    #: A message over this goes to the dead letters unread.
    max_message_bytes: Annotated[int, Field(ge=65_536)] = 33_554_432
    #: After so long without an answer a connection counts as dead.
    read_timeout_s: float = 10.0

    @field_validator("url")
    @classmethod
    def _has_a_known_scheme(cls, value: str) -> str:
        if not re.fullmatch(r"embedded|(redis|rediss|unix)://.+|sentinel://.+\?.*master=.+", value):
            raise ValueError(
                "it must be `embedded`, redis://, rediss://, unix:// or sentinel://host:26379/0?master=NAME"
            )
        return value

    @field_validator("read_timeout_s")
    @classmethod
    def _outlasts_an_idle_wait(cls, value: float) -> float:
        if not MIN_READ_TIMEOUT_S <= value < float("inf"):
            raise ValueError(
                f"it must be {MIN_READ_TIMEOUT_S:g} or more: "
                "at an empty queue a worker waits almost that long for an answer"
            )
        return value

    @property
    def embedded(self) -> bool:
        return self.url == "embedded"

    @property
    def server_url(self) -> str:
        """The URL to connect to."""
        return f"redis://127.0.0.1:{self.embedded_port}/0" if self.embedded else self.url


class ApiSettings(_Section):
    host: str = "127.0.0.1"
    port: Port = 8000
    #: Processes that serve HTTP, on one port.
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    max_payload_bytes: Annotated[int, Field(ge=1024)] = 1_048_576
    #: Of one process; further ones are told to come again.
    max_connections: Annotated[int, Field(ge=1)] = 16_000
    #: How long a caller may take to send a request's head.
    head_timeout_s: Seconds = 10.0
    #: How long a caller may pause within a body; a body of less than a KiB a second is cut off, too.
    body_timeout_s: Seconds = 10.0
    #: How long a caller may take nothing of an answer that is sent to it.
    send_timeout_s: Seconds = 30.0
    #: How long results are kept.
    result_ttl_s: Annotated[int, Field(ge=1)] = 86_400
    #: Whether /docs and /openapi.json are there; they tell what the service can do, and ask for no key.
    docs: bool = True
    #: Who may scrape /metrics: callers with a key of the scope `metrics` (everybody, while no keys are in force);
    #: everybody; or nobody.
    metrics: Literal["keys", "open", "off"] = "keys"
    #: Longest `Prefer: wait=N` and `?wait=N`.
    max_wait_s: Annotated[float, Field(gt=0, le=600)] = 60.0
    #: Where callers find this service; makes the links in webhooks absolute.
    public_url: str = ""

    @field_validator("metrics", mode="before")
    @classmethod
    def _off_in_yaml(cls, value: object) -> object:
        # YAML reads `off` as false.
        return "off" if value is False else value

    @field_validator("public_url")
    @classmethod
    def _is_a_url(cls, value: str) -> str:
        if value and not re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", value):
            raise ValueError("write it as https://host or https://host/path")
        return value.rstrip("/")


class AuthSettings(_Section):
    """Who may call the API."""

    #: `keys`: whoever comes with a key of `sheaf keys create`. As long as there is none, everybody on this machine, and
    #: the API listens on loopback only. `none`: whoever reaches the API.
    mode: Literal["keys", "none"] = "keys"


class FlowerSettings(_Section):
    enabled: bool = True
    host: str = "127.0.0.1"
    port: Port = 5555
    #: `user:password`; left out, one is made at each start and printed, but on loopback in dev: there it asks for none.
    basic_auth: SecretStr | None = None
    #: Whether it only shows. Otherwise whoever reaches it may revoke tasks and stop workers.
    read_only: bool = True

    @field_validator("basic_auth")
    @classmethod
    def _names_a_user(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not re.fullmatch(r"[^:]+:.+", value.get_secret_value()):
            raise ValueError("write it as user:password")
        return value


class WorkerSettings(_Section):
    #: `auto`, `cpu`, or the indices of GPUs with commas between.
    devices: str = "auto"
    #: Batches held ahead of the device.
    prefetch_batches: Annotated[int, Field(ge=1, le=64)] = 4
    metrics_host: str = "127.0.0.1"
    #: Of the first device; the next one has the next port.
    metrics_port: Port = 9101
    #: How long a running batch may take to end when the worker is told to stop.
    shutdown_grace_s: Seconds = 30.0
    #: Threads that torch computes with on the CPU; None for torch's own choice.
    cpu_threads: Annotated[int, Field(ge=1)] | None = None
    #: Whether fp32 products may run in TF32 on GPUs that have it.
    tf32: bool = True

    @field_validator("devices", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> str:
        text = ",".join(str(one) for one in value) if isinstance(value, list) else str(value)
        text = text.replace(" ", "")
        if not _DEVICES.fullmatch(text):
            raise ValueError("it must be auto, cpu, or GPU indices such as 0,1")
        if len(set(text.split(","))) != len(text.split(",")):
            raise ValueError("a device is named twice")
        return text


class IoSettings(_Section):
    """The io worker: what follows results."""

    metrics_port: Port = 9100
    #: Where callbacks (link, chain, chord) go whose signature names no queue; the shop's `task_default_queue`.
    default_queue: Annotated[str, Field(min_length=1)] = "celery"
    #: Task name, or a pattern with `*`, to queue; for shops whose own Celery settings route by name.
    task_routes: dict[str, str] = Field(default_factory=dict)


class LoggingSettings(_Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "text"] = "json"


class ModelSettings(_Section):
    """One model. Exactly one of `task` and `handler` says how it is run."""

    task: Literal["embedding"] | None = None
    #: `package.module:Class`, a subclass of `inference.Handler`.
    handler: str | None = None
    source: str | None = None
    version: str = "1"
    precision: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    max_batch_size: Annotated[int, Field(ge=1, le=4096)] = 32
    #: Padded tokens of a batch: its longest row x its rows.
    max_batch_tokens: Annotated[int, Field(ge=1)] = 8192
    #: Counted from when a job was enqueued.
    max_wait_ms: Annotated[float, Field(ge=0)] = 10.0
    #: Numbers of rows that the device runs best, ascending: a batch that need not wait is cut to one of these.
    preferred_batch_sizes: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    #: Wait, within `max_wait_ms`, only while another row is likely to come soon enough to be worth it.
    adaptive_wait: bool = False
    #: Lengths that an embedding may be cut to (`dimensions` of /v1/embeddings); only for models trained for it.
    matryoshka_dimensions: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    max_length: Annotated[int, Field(ge=1)] | None = None
    over_length: Literal["truncate", "refuse"] = "truncate"
    warmup: bool = True
    #: A batch's step (preprocess, infer, postprocess) that takes longer counts as frozen: its worker ends, another is
    #: started, and the batch's jobs come back with their attempt counted.
    step_timeout_s: Seconds = 600.0
    #: For the handler alone.
    options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("handler")
    @classmethod
    def _names_a_class(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[\w.]+:\w+", value):
            raise ValueError("write it as package.module:Class")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.task is None) == (self.handler is None):
            raise ValueError("set either task or handler")
        if self.max_length is not None and self.max_length > self.max_batch_tokens:
            raise ValueError("max_length is over max_batch_tokens: a row that long would fit no batch")
        if self.max_batch_tokens < self.max_batch_size:
            raise ValueError(
                "max_batch_tokens is below max_batch_size: no batch could ever be full, each would wait for max_wait_ms"
            )
        sizes = self.preferred_batch_sizes
        if sizes != sorted(set(sizes)):
            raise ValueError(f"preferred_batch_sizes must ascend, and name no size twice: {sizes}")
        if sizes and sizes[-1] > self.max_batch_size:
            raise ValueError(
                f"preferred_batch_sizes names {sizes[-1]}, and max_batch_size is {self.max_batch_size}: "
                "no batch could hold so many rows"
            )
        return self


def _model_name(name: str) -> str:
    if not MODEL_NAME.fullmatch(name):
        raise ValueError("this is no model name: use up to 64 of a-z, 0-9, dot, underscore and hyphen")
    if name.startswith("sheaf."):
        raise ValueError("names that begin with `sheaf.` are the service's own")
    return name


class Settings(_Section):
    broker: BrokerSettings = BrokerSettings()
    api: ApiSettings = ApiSettings()
    auth: AuthSettings = AuthSettings()
    flower: FlowerSettings = FlowerSettings()
    workers: WorkerSettings = WorkerSettings()
    io: IoSettings = IoSettings()
    webhooks: WebhookSettings = WebhookSettings()
    batches: BatchSettings = BatchSettings()
    files: FileSettings = FileSettings()
    logging: LoggingSettings = LoggingSettings()
    models: dict[Annotated[str, AfterValidator(_model_name)], ModelSettings] = Field(default_factory=dict)

    @field_validator("models")
    @classmethod
    def _not_empty(cls, models: dict[str, ModelSettings]) -> dict[str, ModelSettings]:
        if not models:
            raise ValueError("there must be at least one model")
        return models

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        ports = {"api.port": self.api.port, "workers.metrics_port": self.workers.metrics_port}
        ports["io.metrics_port"] = self.io.metrics_port
        if self.flower.enabled:
            ports["flower.port"] = self.flower.port
        if self.broker.embedded:
            ports["broker.embedded_port"] = self.broker.embedded_port
        taken: dict[int, str] = {}
        for key, port in ports.items():
            if port in taken:
                raise ValueError(f"{key} and {taken[port]} are both {port}")
            taken[port] = key
        if self.broker.max_message_bytes < 2 * self.api.max_payload_bytes:
            raise ValueError(
                "broker.max_message_bytes is below twice api.max_payload_bytes: a payload is a third larger in its "
                "message, and workers would refuse what the API accepted"
            )
        for name, model in self.models.items():
            if 0 < self.broker.max_queue_depth < model.max_batch_size:
                raise ValueError(
                    f"broker.max_queue_depth is below models.{name}.max_batch_size: no batch could ever be full, "
                    "each would wait for max_wait_ms"
                )
            if model.max_wait_ms / 1e3 >= self.api.max_wait_s:
                raise ValueError(f"models.{name}.max_wait_ms is not below api.max_wait_s: no caller could wait for it")
        return self
