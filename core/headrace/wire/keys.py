"""Key material of one run: who may talk to whom across hosts.

CURVE authenticates the server to the client; an allow-list of one client key authenticates the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

import zmq

from headrace.errors import WireError

_KEY_CHARACTERS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Z85 text, 40 characters each. One set is made per run and handed to its nodes only."""

    server_public: str
    server_secret: str = field(repr=False)
    client_public: str
    client_secret: str = field(repr=False)

    def __post_init__(self) -> None:
        for item in fields(self):
            if len(getattr(self, item.name)) != _KEY_CHARACTERS:
                raise WireError(
                    f"key {item.name} has {len(getattr(self, item.name))} characters, {_KEY_CHARACTERS} were expected",
                    fix="make keys with Keys.generate() and pass them on unchanged",
                )

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
        if values.keys() != names:
            raise WireError(f"keys {sorted(values)} were given, {sorted(names)} were expected")
        return cls(**values)
