"""What the parser of HTTP refuses, said to whoever wrote the request."""

from __future__ import annotations

import re

#: From the parser's own words (llhttp's) to ours; the first that fits.
_SAID = [
    (re.compile(found, re.IGNORECASE), said)
    for found, said in (
        ("method", "it does not begin with a method of HTTP, such as GET or POST"),
        ("url", "its target has a character that no url may have"),
        (
            "content-length.*transfer-encoding|transfer-encoding.*content-length",
            "it has both Content-Length and Transfer-Encoding, and may have one of them",
        ),
        ("transfer-encoding", "its Transfer-Encoding is not `chunked`"),
        ("content-length", "its Content-Length is not one number, or is too large a one"),
        ("chunk", "a chunk of its body is not as long as its chunk size says, or has none"),
        ("connection: close", "more came after a request that said `Connection: close`"),
        ("version|http/|start line", "its first line does not end with a version of HTTP, such as HTTP/1.1"),
        ("header|token|cr|lf|whitespace", "a line of its head is no header, `name: value`, or does not end with CR LF"),
    )
]


def plainly(error: str) -> str:
    """What is wrong with a request of which the parser says this."""
    return next((said for found, said in _SAID if found.search(error)), "it cannot be read")
