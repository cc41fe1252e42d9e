"""Batches: files of requests as OpenAI's batch API has them, run as any other file of rows.

A line is a request to one of the endpoints below, with an id that its answer is found by. Lines are checked before the
first is run. Their rows travel through the same engine as those of `sheaf bulk`.
"""

from bulk.batches.endpoints import ENDPOINTS
from bulk.batches.run import BatchRunner, Report

__all__ = ["ENDPOINTS", "BatchRunner", "Report"]
