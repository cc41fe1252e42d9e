"""The courier of the io worker: leases what webhooks are to be told, calls them, and writes down how it went."""

from workers.courier.courier import NO_LIMIT, Courier

__all__ = ["NO_LIMIT", "Courier"]
