"""Which settings hold secrets. Their fields say so by a `Secret` in their annotation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from clawstream.schemas.settings.base import Secret

ITEM = "*"
"""In a path: any item of a list or mapping."""


def secret_fields(model: type[BaseModel]) -> Iterator[tuple[tuple[str, ...], Secret]]:
    """Yield the path of each marked field of a model, and its mark."""
    for name, field in model.model_fields.items():
        mark = next((found for found in field.metadata if isinstance(found, Secret)), None)
        if mark is not None:
            yield (name,), mark
        for head, inner in _models(field.annotation):
            for path, found in secret_fields(inner):
                yield (name, *head, *path), found


def holds_secret(model: type[BaseModel], path: str) -> bool:
    """Return whether the value at a path `a.b` may contain a secret."""
    words = path.split(".")
    return any(
        all(ITEM in (a, b) or a == b for a, b in zip(words, secret, strict=False))
        for secret, _ in secret_fields(model)
    )


def _models(annotation: Any) -> Iterator[tuple[tuple[str, ...], type[BaseModel]]]:
    """Yield the models in an annotation, each with the path from the field to it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield (), annotation
        return
    origin = get_origin(annotation)
    is_collection = isinstance(origin, type) and issubclass(origin, tuple | list | Mapping)
    for argument in get_args(annotation):
        for head, inner in _models(argument):
            yield ((ITEM, *head) if is_collection else head), inner
