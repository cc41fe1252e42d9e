"""Our key names beside Celery's own."""

from __future__ import annotations

import pytest
from celery import Celery

from broker.keys import Keys


@pytest.mark.parametrize("prefix", ["", "shop", "shop:", "shop_", "shop-", "shop.", "größe/"])
def test_results_are_where_celery_looks_for_them(prefix: str) -> None:
    app = Celery(backend="redis://127.0.0.1:1/0", set_as_current=False)
    app.conf.result_backend_transport_options = {"global_keyprefix": prefix}
    assert Keys(prefix).result("an-id").encode() == app.backend.get_key_for_task("an-id")  # type: ignore[attr-defined]  # the stubs know the base class only
