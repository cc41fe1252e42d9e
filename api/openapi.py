"""The OpenAPI document: what the routes say, and what holds for all of them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.routing import compile_path

from api import kinds
from api.problems import described
from api.schemas import ProblemBody

#: Pages that ask for no key.
OPEN_PATHS = frozenset({"/livez", "/readyz", "/v2/health/live", "/v2/health/ready"})
#: What any page behind the gate may answer.
_COMMON = described(kinds.UNAUTHENTICATED, kinds.FORBIDDEN, kinds.MISDIRECTED, kinds.INTERNAL, kinds.BROKER_UNAVAILABLE)
#: And any that changes something.
_CHANGING = described(kinds.CROSS_ORIGIN)
_REFERENCE = "#/components/schemas/{model}"
_REQUEST_ID = {
    "name": "X-Request-ID",
    "in": "header",
    "schema": {"type": "string"},
    "description": "Found again in the answer, in log lines and in problems; made here when it is missing, or is not 1 "
    "to 128 letters, digits and `_ . : -`.",
}
_HEADERS = {
    "X-Request-ID": {"schema": {"type": "string"}, "description": "The request's id."},
    "Server-Timing": {"schema": {"type": "string"}, "description": "Milliseconds in the server, and of a job's steps."},
}


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """`requestBody` of a page that reads its body by itself."""
    return {
        "required": True,
        "content": {"application/json": {"schema": model.model_json_schema(ref_template=_REFERENCE)}},
    }


def form_body(model: type[BaseModel]) -> dict[str, Any]:
    """`requestBody` of a page that reads a form with a file."""
    return {
        "required": True,
        "content": {"multipart/form-data": {"schema": model.model_json_schema(ref_template=_REFERENCE)}},
    }


def document(app: FastAPI) -> dict[str, Any]:
    """The document of this app. Made once."""
    if app.openapi_schema is None:
        app.openapi_schema = _document(app)
    return app.openapi_schema


def methods(app: FastAPI, path: str) -> list[str]:
    """What the page of this path takes."""
    paths = document(app)["paths"]
    found = next((pattern for pattern in paths if compile_path(pattern)[0].match(path)), None)
    return [] if found is None else sorted(method.upper() for method in paths[found])


def _document(app: FastAPI) -> dict[str, Any]:
    made = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes, tags=app.openapi_tags
    )
    schemas = made.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas["Problem"] = ProblemBody.model_json_schema(ref_template=_REFERENCE)
    made["components"]["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "description": "A key of `sheaf keys create`: `sheaf_…`."}
    }
    for path, operations in made["paths"].items():
        for method, operation in operations.items():
            _complete(operation, path, changes=method != "get")
            if "requestBody" in operation:
                for content in operation["requestBody"]["content"].values():
                    _name_body(content, schemas)
    return made


def _name_body(content: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Put the schema of a body, and those within it, where all schemas are."""
    schema = dict(content["schema"])
    schemas |= schema.pop("$defs", {})
    schemas[schema["title"]] = schema
    content["schema"] = {"$ref": _REFERENCE.format(model=schema["title"])}


def _complete(operation: dict[str, Any], path: str, *, changes: bool) -> None:
    operation.setdefault("parameters", []).append(_REQUEST_ID)
    responses = operation["responses"]
    # Ours is a problem, and described by the routes that take parameters.
    if "422" in responses and "application/problem+json" not in responses["422"].get("content", {}):
        responses |= _as_text(described(kinds.INVALID_REQUEST))
    if path not in OPEN_PATHS:
        # `{}`: without any keys no key is needed.
        operation["security"] = [{"key": []}, {}]
        for common in (_COMMON, _CHANGING) if changes else (_COMMON,):
            for status, response in _as_text(common).items():
                responses[status] = _merged(responses[status], response) if status in responses else response
    for response in responses.values():
        response["headers"] = {**response.get("headers", {}), **_HEADERS}


def _as_text(responses: dict[int | str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {str(status): response for status, response in responses.items()}


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """One description of a status that has several problems."""
    media_type = "application/problem+json"
    contents = [response["content"][media_type] for response in (first, second)]
    examples = contents[0]["examples"] | contents[1]["examples"]
    return {
        **first,
        "description": f"{first['description'].rstrip('.')}; {second['description']}",
        "content": {media_type: {**contents[0], "examples": examples}},
    }
