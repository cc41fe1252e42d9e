"""What webhooks are told of the ends of batches, by real calls of the io worker."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
from standardwebhooks import Webhook

from tests.batches.running import begin, embedding, end_of, running
from tests.conftest import wait_until
from tests.receiver import Receiver
from tests.services import run_sheaf


def test_the_end_of_a_batch_is_told_signed_and_thin(tmp_path: Path) -> None:
    with Receiver() as receiver, running(tmp_path, webhooks={"allow": ["127.0.0.1"]}) as batches:
        by_key, own = receiver.url("/key"), receiver.url("/own")
        with batches.client("shop", "--webhook-url", by_key) as client:
            good = end_of(client, begin(client, [embedding("1"), embedding("2", "")], metadata={"order": "7"}))
            bad = end_of(client, begin(client, [b"no json"], extra_body={"webhook": {"url": own}}))
            wait_until(lambda: receiver.calls("/key") and receiver.calls("/own"), description="both are told")
            [told], [failed] = receiver.calls("/key"), receiver.calls("/own")
            secret = run_sheaf(
                "--config", str(batches.config), "webhooks", "secret", "--owner", "shop", folder=tmp_path
            )
            event = Webhook(secret.stdout.split()[0]).verify(told.body, dict(told.headers))
            assert event["type"] == "batch.completed"
            data = event["data"]
            assert (data["id"], data["object"], data["status"]) == (good.id, "batch", "completed")
            assert data["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
            assert (data["output_file_id"], data["error_file_id"]) == (good.output_file_id, good.error_file_id)
            assert data["metadata"] == {"order": "7"}
            wrong = json.loads(failed.body)
            assert (wrong["type"], wrong["data"]["id"]) == ("batch.failed", bad.id)
            assert "no JSON" in wrong["data"]["error"]
            url = f"{batches.base}{data['urls']['deliveries']}"
            [delivery] = httpx.get(url, headers={"authorization": f"Bearer {client.api_key}"}).json()["data"]
            assert (delivery["event"], delivery["state"]) == ("batch.completed", "delivered")
