"""Types as msgspec can decode them: ``Array | Ragged``, with or without ``Repeated``, is a union that it refuses.

A type that reaches such a union is decoded into a mirror (the same fields, the union replaced by :class:`ColumnOnWire`
or :class:`ValueOnWire`) and restored. Every other type is decoded by msgspec directly. A type that contains itself
must not reach such a union.

Invariant: what the original's constructor checks is checked for received values too: restoring calls it, and a mirror
of a Struct that needs no restoring, because no dataclass is inside, is a subclass of it.
"""

from __future__ import annotations

import dataclasses
from functools import reduce
from operator import or_
from types import UnionType
from typing import Any, ForwardRef, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from msgspec.structs import fields as struct_fields

from headrace.contract import Ragged, Repeated


class _Registered(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, (np.ndarray, Ragged))


class ColumnOnWire(metaclass=_Registered):
    """Stands for ``Array | Ragged`` in mirrors."""


class _RegisteredToo(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, (np.ndarray, Ragged, Repeated))


class ValueOnWire(metaclass=_RegisteredToo):
    """Stands for ``Array | Ragged | Repeated`` in mirrors."""


_mirrors: dict[type, type] = {}
_originals: dict[type, type] = {}
_mirrored_fields: dict[type, frozenset[str]] = {}


def wire_type(annotation: Any) -> tuple[Any, bool]:
    """What msgspec shall decode, and whether the result must go through :func:`restore`."""
    translated = _translate(annotation, ())
    return translated, _needs_restore(translated)


def restore(value: Any) -> Any:
    """Replace mirrors by their originals, in containers too."""
    kind = type(value)
    if kind in _originals:
        fields = _mirrored_fields[kind]
        values = {
            name: restore(getattr(value, name)) if name in fields else getattr(value, name)
            for name in kind.__struct_fields__
        }
        return _originals[kind](**values)
    if kind is list or kind is tuple:
        return kind(restore(item) for item in value)
    if kind is dict:
        return {key: restore(item) for key, item in value.items()}
    return value


def is_array(annotation: Any) -> bool:
    """Whether an annotation is a numpy array, parametrised or not."""
    return annotation is np.ndarray or get_origin(annotation) is np.ndarray


def _translate(annotation: Any, inside: tuple[type, ...]) -> Any:
    arguments = get_args(annotation)
    origin = get_origin(annotation)
    if is_array(annotation) or isinstance(annotation, (str, ForwardRef)):
        return annotation
    if origin in (Union, UnionType):
        return _translate_union(arguments, inside)
    if arguments:
        translated = tuple(a if a is Ellipsis else _translate(a, inside) for a in arguments)
        return annotation if translated == arguments or origin is None else _subscript(annotation, translated)
    if isinstance(annotation, type) and annotation not in inside and _fields(annotation):
        return _mirror(annotation, inside)
    return annotation


def _subscript(annotation: Any, arguments: tuple[Any, ...]) -> Any:
    origin = get_origin(annotation)
    return origin[arguments if len(arguments) > 1 else arguments[0]] if origin is not None else annotation


def _translate_union(arguments: tuple[Any, ...], inside: tuple[type, ...]) -> Any:
    rest = [a for a in arguments if not is_array(a) and a not in (Ragged, Repeated)]
    stand_in = {2: ColumnOnWire, 3: ValueOnWire}.get(len(arguments) - len(rest))
    if stand_in is not None:
        return reduce(or_, rest, stand_in)
    return reduce(or_, [_translate(a, inside) for a in arguments])


def _fields(kind: type) -> dict[str, Any]:
    """Field name → type of a dataclass or Struct; empty for anything else."""
    if not (dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct)):
        return {}
    names = kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else [f.name for f in _dataclass_fields(kind)]
    hints = get_type_hints(kind)
    return {name: hints[name] for name in names}


def _mirror(kind: type, inside: tuple[type, ...]) -> type:
    if kind in _mirrors:
        return _mirrors[kind]
    fields = _fields(kind)
    translated = {name: _translate(hint, (*inside, kind)) for name, hint in fields.items()}
    if translated == fields:
        return kind
    if issubclass(kind, msgspec.Struct) and not any(map(_needs_restore, translated.values())):
        mirror = _mirrors[kind] = _subclass(kind, translated)
        return mirror
    mirror = _define_mirror(kind, translated)
    _originals[mirror] = kind
    _mirrored_fields[mirror] = frozenset(name for name, hint in translated.items() if _needs_restore(hint))
    _mirrors[kind] = mirror
    return mirror


def _subclass(kind: type[msgspec.Struct], fields: dict[str, Any]) -> type:
    """A mirror that is one of its originals: there is nothing to restore."""
    described = [_field(f.name, fields, f.default, f.default_factory, f.encode_name) for f in struct_fields(kind)]
    config = kind.__struct_config__
    return msgspec.defstruct(
        kind.__name__,
        described,
        bases=(kind,),
        tag=config.tag,
        tag_field=config.tag_field if config.tag is not None else None,
    )


def _define_mirror(kind: type, fields: dict[str, Any]) -> type:
    if issubclass(kind, msgspec.Struct):
        config = kind.__struct_config__
        described = [_field(f.name, fields, f.default, f.default_factory, f.encode_name) for f in struct_fields(kind)]
        return msgspec.defstruct(
            kind.__name__,
            described,
            kw_only=True,
            array_like=config.array_like,
            tag=config.tag,
            tag_field=config.tag_field if config.tag is not None else None,
        )
    described = [_field(f.name, fields, f.default, f.default_factory, f.name) for f in _dataclass_fields(kind)]
    return msgspec.defstruct(kind.__name__, described, kw_only=True)


def _field(name: str, fields: dict[str, Any], default: Any, factory: Any, encode_name: str) -> tuple[str, Any, Any]:
    if default is not dataclasses.MISSING and default is not msgspec.NODEFAULT:
        return name, fields[name], msgspec.field(default=default, name=encode_name)
    if factory is not dataclasses.MISSING and factory is not msgspec.NODEFAULT:
        return name, fields[name], msgspec.field(default_factory=factory, name=encode_name)
    return name, fields[name], msgspec.field(name=encode_name)


def _dataclass_fields(kind: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(kind)


def _needs_restore(annotation: Any) -> bool:
    return annotation in _originals if isinstance(annotation, type) else any(map(_needs_restore, get_args(annotation)))
