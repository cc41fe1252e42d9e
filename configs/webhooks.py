"""The settings of webhooks: whom they may call, how often, and for how long."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from webhooks import Policy

Seconds = Annotated[float, Field(gt=0)]


class WebhookSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    #: Host names, addresses and networks that may be called though they are not public, over http too. At all of their
    #: ports, not only the receiver's.
    allow: tuple[str, ...] = ()
    #: Whether http:// is taken for hosts that are not listed in `allow`.
    allow_http: bool = False
    #: From the first byte of a call to the head of its answer.
    timeout_s: Annotated[float, Field(gt=0, le=300)] = 15.0
    #: Pauses before each attempt; as many attempts as entries. A random part of up to a fifth comes on top.
    retry_schedule_s: tuple[Annotated[float, Field(ge=0, le=604_800)], ...] = (
        *(0, 5, 300, 1800),
        *(7200, 18_000, 36_000, 50_400),
    )
    #: Calls, and deliveries that are about to be called, of one io worker. An owner has half of them at most, and less
    #: beside others (`workers.portions`).
    max_in_flight: Annotated[int, Field(ge=1, le=10_000)] = 512
    #: Calls at once of a host, whatever its port and whoever calls. They are shared like `max_in_flight`: an owner has
    #: half of them at most, and one at least when alone.
    max_per_host: Annotated[int, Field(ge=1)] = 32
    #: After so many failed calls of one owner in a row it leaves a host alone for a while, and for longer each time.
    breaker_failures: Annotated[int, Field(ge=1)] = 10
    breaker_open_s: Seconds = 30.0
    #: How long the secret before the present one signs too.
    previous_secret_s: Annotated[float, Field(ge=0)] = 86_400.0
    #: How long a delivery can be looked at and sent again once it is over; one that arrived, with what was sent in it,
    #: need not be kept for as long as one that failed.
    keep_delivered_s: Annotated[int, Field(ge=60)] = 86_400
    keep_s: Annotated[int, Field(ge=60)] = 604_800

    @field_validator("allow")
    @classmethod
    def _can_be_read(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        Policy.of(value, allow_http=False)
        return value

    @field_validator("retry_schedule_s")
    @classmethod
    def _begins_at_once(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not value or value[0] != 0:
            raise ValueError("it must begin with 0: the first attempt is made at once")
        return value

    @cached_property
    def policy(self) -> Policy:
        return Policy.of(self.allow, allow_http=self.allow_http)
