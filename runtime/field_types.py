"""Which values a field of a pydantic model takes: text, or anything else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class FieldType:
    """The type of a field. annotation: None for a field that does not exist."""

    annotation: Any

    @property
    def optional(self) -> bool:
        """Whether the field may be null."""
        return NoneType in _alternatives(self.annotation)

    @property
    def is_text(self) -> bool:
        """Whether only text is valid: names, ids, paths, words of a fixed set."""
        kinds = [kind for kind in _alternatives(self.annotation) if kind is not NoneType]
        return bool(kinds) and all(map(_is_text, kinds))

    @property
    def keys(self) -> FieldType:
        """Return the type of the keys."""
        for kind in _alternatives(self.annotation):
            if _is_mapping(kind):
                return FieldType(get_args(kind)[0])
        return FieldType(str)

    def of(self, name: str | None) -> FieldType:
        """Return the type of the field or key of this name, or of an item (None)."""
        for kind in _alternatives(self.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                if name is not None and name in kind.model_fields:
                    return FieldType(kind.model_fields[name].annotation)
            elif get_args(kind) and (_is_mapping(kind) == (name is not None)):
                return FieldType(get_args(kind)[1 if name is not None else 0])
        return FieldType(None)


def field_at(model: type[BaseModel], path: str) -> FieldType:
    """Return the type of the field at a path `a.b`."""
    found = FieldType(model)
    for name in path.split("."):
        found = found.of(name)
    return found


def _alternatives(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union, or the annotation itself."""
    if get_origin(annotation) is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for kind in get_args(annotation):
            yield from _alternatives(kind)
    elif annotation is not None:
        yield annotation


def _is_mapping(kind: Any) -> bool:
    origin = get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _is_text(kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return all(isinstance(word, str) for word in get_args(kind))
    return isinstance(kind, type) and issubclass(kind, str | PurePath)
