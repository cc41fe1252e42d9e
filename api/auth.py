"""Who calls, and what they may do.

Keys are in force as soon as there is one. Without any, everybody may do everything, but only on loopback: the server
does not listen elsewhere then, unless `auth.mode: none` says that this is meant.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import Request

from api import kinds
from api.headers import header
from api.hosts import is_address
from api.problems import Problem, shown
from api.schemas import PRIORITIES, PriorityName
from broker import AccessKey, AsyncBroker, BrokerUnavailable, JobState, Quota, Scope, Webhook
from broker.access import key_id, matches

log = logging.getLogger(__name__)

#: Seconds after which the keys are read again: so long a revoked one may still open.
REFRESH_EVERY_S = 1.0
#: Seconds between looks for keys that are not known: whoever guesses waits, and does not keep the broker busy.
LOOK_AGAIN_S = 0.1

_BEARER = re.compile(r"bearer +(\S+) *", re.IGNORECASE)
#: Methods that change nothing (RFC 9110, section 9.2.1).
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_CHALLENGE = {"www-authenticate": 'Bearer realm="sheaf"'}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. `key` is None when no keys are in force."""

    owner: str
    key: AccessKey | None = None

    @property
    def quota(self) -> Quota | None:
        return None if self.key is None else self.key.quota

    @property
    def webhook(self) -> Webhook | None:
        return None if self.key is None else self.key.webhook

    def may_read(self, job: JobState) -> bool:
        """Whether this is a job of theirs; to everybody else it does not exist."""
        return self.may_see(job.owner)

    def may_see(self, owner: str | None) -> bool:
        """Whether what belongs to this owner exists for them."""
        return self.key is None or self.key.allows(Scope.ADMIN) or owner == self.owner

    def priority(self, wanted: PriorityName | None) -> PriorityName:
        """The priority of a job that asks for this one, or for none. Raises `Problem`."""
        allowed = PRIORITIES if self.key is None else self.key.priorities
        if wanted is None:
            return "normal" if "normal" in allowed else next(name for name in PRIORITIES if name in allowed)
        if wanted not in allowed:
            raise Problem(
                kinds.PRIORITY_FORBIDDEN, f"this key may not submit with priority {wanted}, but {', '.join(allowed)}"
            )
        return wanted


class Gate:
    """Lets callers in. `open_without_keys`: the server is reached from this machine alone."""

    def __init__(self, broker: AsyncBroker, *, required: bool, open_without_keys: bool) -> None:
        self._broker = broker
        self._required = required
        self._open_without_keys = open_without_keys
        #: None until they were read once.
        self._keys: dict[str, AccessKey] | None = None
        #: Ids of those that had not expired when the keys were last read.
        self._valid: frozenset[str] = frozenset()
        self._looked_at = float("-inf")
        self._look: asyncio.Future[None] | None = None

    async def keep_fresh(self) -> None:
        """Read the keys again and again, for as long as the process lives."""
        while self._required:
            try:
                await self._read()
            except BrokerUnavailable as error:
                log.debug("The keys cannot be read now; the known ones hold.", extra={"cause": str(error)})
            await asyncio.sleep(REFRESH_EVERY_S)

    async def caller(self, request: Request, scope: Scope) -> Caller:
        """Who sends this request. Raises `Problem` when they may not, `BrokerUnavailable` when that is not known."""
        found = _BEARER.fullmatch(header(request, b"authorization") or "")
        token = found[1] if found else None
        if not await self._closed(token):
            if self._required:
                _refuse_other_hosts(request)
            _refuse_other_origins(request)
            # Nobody is asked to prove anything, but those who come with a token get a share of their own.
            return Caller("" if token is None else hashlib.sha256(token.encode()).hexdigest()[:16])
        key = None if token is None else await self._known(token)
        if key is None:
            said = "there is no such key" if token else "send a key as `Authorization: Bearer sheaf_…`"
            raise Problem(kinds.UNAUTHENTICATED, said, headers=_CHALLENGE)
        request.state.key_id = key.id
        if not key.allows(scope):
            held = ", ".join(key.scopes)
            raise Problem(kinds.FORBIDDEN, f"this needs a key with the scope {scope}, this one has {held}")
        return Caller(key.owner, key)

    def admits(self, caller: Caller) -> bool:
        """Whether a caller who was let in would be again: their key may have been revoked, or have expired."""
        if caller.key is None:
            return True
        return caller.key.id in (self._keys or ()) and not caller.key.expired(time.time())

    def check(self, caller: Caller) -> None:
        """Raises `Problem` for one who was let in and would not be again."""
        if not self.admits(caller):
            said = "the key was revoked, or has expired, while the request waited"
            raise Problem(kinds.UNAUTHENTICATED, said, headers=_CHALLENGE)

    async def _closed(self, token: str | None) -> bool:
        """Whether keys are in force. Whoever comes with one when none is known may have the first."""
        if not self._required:
            return False
        if self._keys is None or (not self._keys and token is not None and key_id(token)):
            await self._look_again()
        return bool(self._keys) or not self._open_without_keys

    async def _known(self, token: str) -> AccessKey | None:
        named = key_id(token)
        if named is None or self._keys is None:
            return None
        if named not in self._keys:
            # It may be a moment old.
            await self._look_again()
        key = self._keys.get(named)
        return key if key is not None and matches(token, key) and not key.expired(time.time()) else None

    async def _look_again(self) -> None:
        """Those who need it together share one look."""
        if self._look is None:
            self._look = asyncio.ensure_future(self._read_in_turn())
            self._look.add_done_callback(self._looked)
        await asyncio.shield(self._look)

    def _looked(self, look: asyncio.Future[None]) -> None:
        self._look = None
        if not look.cancelled():
            # Whoever waited for it has seen the error; nobody may have.
            look.exception()

    async def _read_in_turn(self) -> None:
        await asyncio.sleep(self._looked_at + LOOK_AGAIN_S - time.monotonic())
        await self._read()

    async def _read(self) -> None:
        keys = await self._broker.access.all()
        self._keys = {key.id: key for key in keys}
        self._looked_at = time.monotonic()
        now = time.time()
        before, self._valid = self._valid, frozenset(key.id for key in keys if not key.expired(now))
        if not before <= self._valid:
            # Whoever waits for a job, or follows one, with a key that was revoked or has expired is shut out now.
            self._broker.wake_waiters()


def _refuse_other_hosts(request: Request) -> None:
    """A web page may let its own name point at this machine, and have its visitors' browsers call an open server."""
    host = header(request, b"host") or ""
    if not is_address(host):
        raise Problem(
            kinds.MISDIRECTED,
            f"without keys this server answers to its address only, not to the name {host!r}: call it by its address, "
            "or create a key (`sheaf keys create`)",
        )


def _refuse_other_origins(request: Request) -> None:
    """A web page may have a browser send forms, and requests without a body, to any address without asking."""
    if request.method in _SAFE:
        return
    site, origin = header(request, b"sec-fetch-site"), header(request, b"origin")
    if site is not None:
        # What the browser knows better than we do behind a proxy: W3C, Fetch Metadata Request Headers, section 2.4.
        foreign = site not in ("same-origin", "none")
    else:
        foreign = origin is not None and urlsplit(origin).netloc != header(request, b"host")
    if foreign:
        page = "another origin" if origin is None else shown(origin)
        raise Problem(
            kinds.CROSS_ORIGIN,
            f"without keys a page of {page} may change nothing here: send it from a program, or create a key "
            "(`sheaf keys create`)",
        )
