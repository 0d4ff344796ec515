"""Bodies that the routes read themselves, because they count as held until the reply."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from gateway.errors import BadRequest, Unprocessable

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]
M = TypeVar("M", bound=BaseModel)


def read_as(model: type[M], body: bytes) -> M:
    """Parse a request's body. Raises BadRequest or Unprocessable that names the field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"])) or "body"
        if first["type"] == "json_invalid":
            raise BadRequest("body: not JSON", "body") from error
        raise Unprocessable(f"{field}: {first['msg']}", field) from error


def in_openapi(model: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a body that the route parses itself."""
    schema = model.model_json_schema()
    named = schema.pop("$defs", {})

    def inline(value: Any) -> Any:
        if isinstance(value, dict):
            if ref := value.get("$ref"):
                return inline(named[ref.rpartition("/")[2]])
            return {k: inline(v) for k, v in value.items()}
        return [inline(v) for v in value] if isinstance(value, list) else value

    content = {"application/json": {"schema": inline(schema)}}
    return {"requestBody": {"required": True, "content": content}}
