"""Why a model cannot be tuned.

TuningError
└── TrafficError    the traffic that was given cannot be used
"""

from __future__ import annotations


class TuningError(Exception):
    """It cannot be done; the text says why, and what to do."""


class TrafficError(TuningError):
    """The traffic cannot be used; of a file, the text names the line."""
