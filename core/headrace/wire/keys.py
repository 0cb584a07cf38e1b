"""Key material of one run: who may talk to whom across hosts.

CURVE authenticates the server to the client; an allow-list of one client key authenticates the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

import zmq

from headrace.errors import WireError

_KEY_CHARACTERS = 40
_UNCHANGED = "make keys with Keys.generate() and pass them on unchanged, as to_dict gives them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Z85 text, 40 characters each. One set is made per run and handed to its nodes only."""

    server_public: str
    server_secret: str = field(repr=False)
    client_public: str
    client_secret: str = field(repr=False)

    def __post_init__(self) -> None:
        for item in fields(self):
            key = getattr(self, item.name)
            if not isinstance(key, str) or len(key) != _KEY_CHARACTERS:
                has = f"has {len(key)} characters" if isinstance(key, str) else f"is of type {type(key).__name__}"
                raise WireError(f"key {item.name} {has}, {_KEY_CHARACTERS} characters were expected", fix=_UNCHANGED)

    @classmethod
    def generate(cls) -> Keys:
        """Fresh random keys."""
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        return cls(
            server_public=server_public.decode(),
            server_secret=server_secret.decode(),
            client_public=client_public.decode(),
            client_secret=client_secret.decode(),
        )

    def to_dict(self) -> dict[str, str]:
        """Plain text values; secrets included."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, str]) -> Keys:
        """The inverse of :meth:`to_dict`. WireError names a missing or unknown key."""
        names = {item.name for item in fields(cls)}
        if not isinstance(values, Mapping) or values.keys() != names:
            given = sorted(map(str, values)) if isinstance(values, Mapping) else type(values).__name__
            raise WireError(f"keys {given} were given, {sorted(names)} were expected", fix=_UNCHANGED)
        return cls(**values)
