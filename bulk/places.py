"""Whether two names mean one file: a run that read what it writes, or wrote two things into one, would destroy it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from urllib.parse import urlsplit

from fsspec import get_filesystem_class

from bulk.errors import SamePlace
from bulk.locations import Location


def check_apart(places: Sequence[tuple[str, Location | Path]]) -> None:
    """See that these, each with what it is called, are as many files. What is no location may be a folder of ours.

    Raises:
        SamePlace: two of them are one.
    """
    for (one, first), (other, second) in combinations(places, 2):
        if _same(first, second):
            raise SamePlace(one, other, first.url if isinstance(first, Location) else str(first))


def _same(one: Location | Path, other: Location | Path) -> bool:
    first, second = _key(one), _key(other)
    if first == second:
        return True
    if not (isinstance(first, Path) and isinstance(second, Path)):
        return False
    if (isinstance(one, Path) and first in second.parents) or (isinstance(other, Path) and second in first.parents):
        return True
    try:
        # Hard links, and names that the file system takes for one.
        return first.samefile(second)
    except OSError:
        return False


def _key(place: Location | Path) -> object:
    """Equal for what lies in one place, links followed."""
    if isinstance(place, Path):
        return Path(os.path.realpath(place))
    if place.path is not None:
        return place.path
    if place.is_standard or "::" in place.url:
        return place.url
    try:
        kind = get_filesystem_class(place.url.partition("://")[0])
        return kind, urlsplit(place.url).netloc.rpartition("@")[2], kind._strip_protocol(place.url)
    except (ImportError, ValueError):
        return place.url
