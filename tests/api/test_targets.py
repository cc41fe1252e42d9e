"""Whether a webhook's address is taken when a job is submitted."""

from __future__ import annotations

import pytest

from api.targets import TargetCheck
from webhooks import Policy, Refused


async def test_a_name_that_leads_inside_is_refused() -> None:
    check = TargetCheck(Policy())
    for _ in range(2):
        with pytest.raises(Refused, match="is not public"):
            await check.check("https://localhost/hook")


async def test_a_name_that_leads_nowhere_now_is_taken() -> None:
    await TargetCheck(Policy()).check("https://no-such-host.invalid/hook")


async def test_a_name_that_the_settings_list_is_not_looked_up() -> None:
    await TargetCheck(Policy.of(["localhost"], allow_http=False)).check("http://localhost/hook")
