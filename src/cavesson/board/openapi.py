"""The OpenAPI description of the board, generated from its table of requests."""

from typing import Any

from cavesson.board.api import ENDPOINTS, Endpoint

ERRORS = {
    "400": "the request cannot be answered",
    "401": "the token is missing",
    "403": "the request comes from another site or host",
    "404": "there is no such run or rollout",
    "408": "the body did not arrive in time",
    "409": "a file of the record or of the index is broken or has just been replaced",
    "422": "a parameter is missing or out of range",
    "503": "too many queries are running; ask again in a few seconds",
}


def describe() -> dict[str, Any]:
    """Return the OpenAPI description."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {"openapi": "3.1.0", "info": {"title": "Cavesson board", "version": "1"}, "paths": paths}


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    schema = endpoint.query.model_json_schema()
    properties, required = schema.get("properties", {}), schema.get("required", [])
    in_path = {name for name in properties if f"{{{name}}}" in endpoint.path}
    in_body = set(properties) - in_path if endpoint.method in ("PUT", "POST") else set()
    parameters = [
        {
            "name": name,
            "in": "path" if name in in_path else "query",
            "required": name in in_path or name in required,
            "description": value.get("description", ""),
            "schema": {key: item for key, item in value.items() if key not in ("description", "title")},
        }
        for name, value in properties.items()
        if name not in in_body
    ]
    operation: dict[str, Any] = {
        "summary": (endpoint.answer.__doc__ or "").split("\n")[0],
        "parameters": parameters,
        "responses": {
            "200": {"description": "the answer", "content": {media: {} for media in endpoint.media.split(" ")}}
        }
        | {code: {"description": text, "content": {"application/json": _ERROR}} for code, text in ERRORS.items()},
    }
    if in_body:
        body = {
            "type": "object",
            "properties": {name: properties[name] for name in in_body},
            "additionalProperties": False,
        }
        body["required"] = [name for name in required if name in in_body]
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation


_ERROR = {
    "schema": {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]},
}
