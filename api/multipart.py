"""The form that brings a file, read as it comes: fields are kept, the file's bytes are handed on.

Source: RFC 7578, and RFC 2046, section 5.1.
"""

from __future__ import annotations

import unicodedata

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from api import kinds
from api.body import check_plain
from api.headers import header
from api.problems import MAX_NAME, Problem, shown, wrong

#: Of a field that is no file.
MAX_FIELD_BYTES = 1024
#: Characters of a file's name.
MAX_FILENAME = 255
#: Of a form besides its file: fields, headers of parts, boundaries.
MAX_FRAMING_BYTES = 65_536

_FILE = "file"
_FIELDS = frozenset(("purpose", "expires_after[anchor]", "expires_after[seconds]"))
#: Encodings of a part that leave its bytes as they are.
_PLAIN = frozenset((b"7bit", b"8bit", b"binary"))


class UploadForm:
    """One form with one file, fed in pieces. What is wrong with it is raised as a `Problem` where it is met."""

    def __init__(self, boundary: bytes) -> None:
        #: Values of the fields whose ends have come, and the file's name once that has.
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        #: Whether the form's end has come.
        self.ended = False
        self._content: list[bytes] = []
        self._header = b""
        self._header_value = b""
        self._headers: dict[bytes, bytes] = {}
        #: Name of the part that is being read.
        self._name = ""
        self._value = b""
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError:
            raise Problem(kinds.BAD_REQUEST, "the boundary of the form is too long") from None

    @classmethod
    def of(cls, request: Request) -> UploadForm:
        """The form that the request's headers announce."""
        content_type = header(request, b"content-type") or ""
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data":
            said = shown(content_type) if content_type else "nothing"
            raise Problem(
                kinds.MEDIA_TYPE_REFUSED, f"send the file as `Content-Type: multipart/form-data`, not as {said}"
            )
        boundary = options.get(b"boundary", b"")
        if not boundary:
            raise Problem(kinds.BAD_REQUEST, "the header content-type names no boundary of the form's parts")
        check_plain(request)
        return cls(boundary)

    def feed(self, data: bytes) -> list[bytes]:
        """Read on; returns what it brought of the file."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise Problem(kinds.BAD_REQUEST, f"this is no multipart/form-data as RFC 7578 has it: {error}") from None
        content, self._content = self._content, []
        return content

    def finish(self) -> str:
        """The body has ended: returns the file's name."""
        if not self.ended:
            raise Problem(kinds.BAD_REQUEST, "the form ends before its last boundary: send it whole")
        if self.filename is None:
            raise wrong(_FILE, "this part is missing: the file's content")
        if "purpose" not in self.fields:
            raise wrong("purpose", "this field is missing: `batch` is the purpose that is taken")
        return self.filename

    # Called by the parser, inside of `feed`.

    def _on_part_begin(self) -> None:
        self._headers = {}
        self._value = b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._header.lower()] = self._header_value
        self._header = self._header_value = b""

    def _on_headers_finished(self) -> None:
        disposition, options = parse_options_header(self._headers.get(b"content-disposition"))
        if disposition != b"form-data" or b"name" not in options:
            raise Problem(kinds.BAD_REQUEST, 'each part of the form needs `Content-Disposition: form-data; name="…"`')
        name = self._name = options[b"name"].decode(errors="replace")
        if name == _FILE:
            if self.filename is not None:
                raise wrong(_FILE, "this part is there twice: send one file at a time")
            self.filename = _filename(options.get(b"filename", b""))
        elif name not in _FIELDS:
            known = ", ".join((_FILE, *sorted(_FIELDS)))
            raise wrong(name[:MAX_NAME], f"there is no such field; there are {known}")
        elif name in self.fields:
            raise wrong(name, "this field is there twice")
        encoding = self._headers.get(b"content-transfer-encoding", b"binary").strip().lower()
        if encoding not in _PLAIN:
            raise wrong(
                name, f"send it as it is, not with Content-Transfer-Encoding {shown(encoding.decode('latin-1'))}"
            )

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == _FILE:
            self._content.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise wrong(self._name, f"it may have {MAX_FIELD_BYTES} bytes")

    def _on_part_end(self) -> None:
        if self._name != _FILE:
            self.fields[self._name] = self._value.decode(errors="replace")

    def _on_end(self) -> None:
        self.ended = True


def _filename(sent: bytes) -> str:
    """The name that a caller's file is called by, without the folders that some clients send."""
    try:
        name = sent.decode().replace("\\", "/").rpartition("/")[2]
    except UnicodeDecodeError:
        raise wrong(_FILE, "its filename is not UTF-8") from None
    if name in ("", ".", ".."):
        raise wrong(_FILE, 'it needs a name: send the part with `filename="…"`')
    if len(name) > MAX_FILENAME:
        raise wrong(_FILE, f"its filename may have {MAX_FILENAME} characters, and has {len(name)}")
    if any(unicodedata.category(character) == "Cc" for character in name):
        raise wrong(_FILE, "its filename holds control characters")
    return name
