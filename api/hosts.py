"""Which names of a server a web page cannot have made: whoever asks for any other may have been led here by one."""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from urllib.parse import urlsplit


@lru_cache(maxsize=256)
def is_address(authority: str) -> bool:
    """Whether a Host header, or the authority of a target, names no name but that of the machine itself."""
    name = ""
    try:
        # What stands before an @ is no part of a host.
        name = "" if "@" in authority else urlsplit(f"//{authority}").hostname or ""
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
    return True
