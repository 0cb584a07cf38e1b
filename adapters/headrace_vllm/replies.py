"""What vLLM's endpoint for token ids answers: those fields of its ``RequestOutput`` that the adapter reads."""

from __future__ import annotations

import msgspec

from headrace.errors import EngineError


class LogProb(msgspec.Struct, frozen=True):
    """Of one token at one place, in nats."""

    token_id: int
    logprob: float


class _Position(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float
    top_logprobs: tuple[LogProb, ...] = ()


class _Positions(msgspec.Struct, frozen=True):
    content: tuple[_Position, ...] | None = None


class WeightSpan(msgspec.Struct, frozen=True):
    """Tokens ``start <= t < end`` of an answer were sampled by weights of this label."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct, frozen=True):
    """An answer, or its next piece."""

    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    weight_versions: tuple[WeightSpan, ...] | None = None
    told: _Positions | None = msgspec.field(name="logprobs", default=None)

    @property
    def logprobs(self) -> list[dict[int, LogProb]]:
        """Per position, of the token that was sampled and of those that were asked for."""
        positions = (self.told and self.told.content) or ()
        return [
            {**{other.token_id: other for other in position.top_logprobs}, position.token_id: _chosen(position)}
            for position in positions
        ]


class Reply(msgspec.Struct, frozen=True):
    """One answer to one request."""

    outputs: tuple[Choice] = msgspec.field(name="choices")

    @property
    def finished(self) -> bool:
        """No more follow."""
        return self.outputs[0].finish_reason is not None


_decoder = msgspec.json.Decoder(Reply)


def read_reply(text: bytes) -> Reply:
    """EngineError for what is none, such as vLLM's word of an error."""
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise EngineError(
            f"a vLLM server answered a request by {text[:200].decode(errors='replace')!r}: {error}",
            fix="see the server's log",
        ) from error


def _chosen(position: _Position) -> LogProb:
    return LogProb(position.token_id, position.logprob)
