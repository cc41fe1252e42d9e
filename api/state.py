"""What the routes share, made once when the app starts."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass, field

from starlette.requests import Request

from api.auth import Gate
from api.envelope import Envelope
from api.kinds import UNKNOWN_MODEL
from api.problems import Problem, shown
from api.targets import TargetCheck
from broker import AsyncBroker, ModelInfo
from bulk.store import FileStore
from configs import ModelSettings, Settings
from telemetry.metrics import ApiMetrics
from telemetry.page import MetricsPage

#: Seconds for which what workers announced is believed; they announce every other second.
BELIEVED_S = 0.5


@dataclass(slots=True)
class ApiState:
    settings: Settings
    broker: AsyncBroker
    gate: Gate
    page: MetricsPage
    metrics: ApiMetrics
    envelope: Envelope
    targets: TargetCheck = field(init=False)
    store: FileStore = field(init=False)
    #: Unix seconds.
    started_at: int = field(default_factory=lambda: int(time.time()))
    _announced: dict[str, list[ModelInfo]] = field(default_factory=dict)
    _announced_at: float = float("-inf")
    _look: asyncio.Future[None] | None = None

    def __post_init__(self) -> None:
        self.targets = TargetCheck(self.settings.webhooks.policy)
        self.store = FileStore(self.settings.files.storage)

    def model(self, name: str) -> ModelSettings:
        """A model of this service. Raises `Problem` for another name."""
        model = self.settings.models.get(name)
        if model is None:
            known = ", ".join(self.settings.models)
            raise Problem(UNKNOWN_MODEL, f"there is no model {shown(name)}: it is one of {known}")
        return model

    async def announced(self) -> dict[str, list[ModelInfo]]:
        """What the workers that live now say of their models, by model name."""
        if time.monotonic() - self._announced_at > BELIEVED_S:
            # Those who ask together share one look.
            if self._look is None:
                self._look = asyncio.ensure_future(self._ask())
                self._look.add_done_callback(self._looked)
            await asyncio.shield(self._look)
        return self._announced

    async def _ask(self) -> None:
        announced: defaultdict[str, list[ModelInfo]] = defaultdict(list)
        for worker in await self.broker.overview.workers():
            for model in worker.models:
                announced[model.name].append(model)
        self._announced, self._announced_at = dict(announced), time.monotonic()

    def _looked(self, look: asyncio.Future[None]) -> None:
        self._look = None
        if not look.cancelled():
            # Whoever waited for it has seen the error; nobody may have.
            look.exception()


def of(request: Request) -> ApiState:
    state = request.app.state.sheaf
    assert isinstance(state, ApiState)
    return state


def model_state(infos: list[ModelInfo]) -> str:
    """One word for a model over all its workers."""
    states = {info.state for info in infos}
    return next((state for state in ("ready", "loading", "failed") if state in states), "absent")
