"""The bridge to llguidance: validates compiled grammars and walks them byte by byte, without a
model.

Used by `constraints.py` and its neighbours only. The tokenizer here has the 256 bytes as its
tokens, so that what it accepts is what the grammar says of text, whatever model runs later.
Every walk is bounded: llguidance limits what one step may cost, and a limit that is hit raises.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from stemma.lang.constraints_limits import meaning, parser_limits
from stemma.lang.constraints_stack import on_deep_stack
from stemma.lang.errors import ConstraintError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    # What it costs, its text, where it leads, and the bytes that may come there.
    _Way = tuple[float, bytes, LLMatcher, bytes]

MOST_SECONDS = 5.0  # of one walk over a text; a grammar that needs more is not usable either
_CHUNK = 16  # bytes between two looks at the clock
_SLOW = 0.1  # seconds that so many take; then it is looked at after each
_MANY_BYTES = 500_000  # in so much time; a grammar that takes them is not the cause
_END = 256  # the token that ends a text
_EXAMPLE_BYTES = 2_000
_MOST_MISSES = 60
_SOFT_BYTES = 60  # from here on an example looks for its end


class _Bytes:
    """A tokenizer whose tokens are the bytes."""

    eos_token_id = _END
    bos_token_id = None
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    special_token_ids = [_END]  # noqa: RUF012 - never changed

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def byte_tokenizer() -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])


def matcher(compiled: str) -> LLMatcher:
    """A matcher at the beginning of a text. Never raises; see `is_error`."""
    from llguidance import LLMatcher

    tokenizer, limits = byte_tokenizer(), parser_limits()
    return on_deep_stack(
        compiled, lambda: LLMatcher(tokenizer, compiled, log_level=0, limits=limits)
    )


def behind(literal: bytes, compiled: str) -> str:
    """The grammar of `literal`, whole characters, followed by a text of a compiled grammar."""
    grammars = grammars_of(compiled)
    text = json.dumps(literal.decode(), ensure_ascii=False).replace("\x7f", r"\u007f")
    start = f"start: {text} @{grammars[0]['name']}"
    return json.dumps({"grammars": [{"name": "behind", "lark_grammar": start}, *grammars]})


def grammars_of(compiled: str) -> list[dict[str, Any]]:
    """The parts of a compiled grammar, the first of which is the whole; each has a name."""
    try:
        grammars = json.loads(compiled)["grammars"]
    except ValueError:  # a grammar in Lark stands for itself
        return [{"name": "whole", "lark_grammar": compiled}]
    return [{**each, "name": each.get("name") or f"part{i}"} for i, each in enumerate(grammars)]


def refusal(compiled: str) -> str:
    """What llguidance has against a grammar, in its words; empty where it takes it."""
    from llguidance import LLMatcher

    is_error, messages = on_deep_stack(
        compiled, lambda: LLMatcher.validate_grammar_with_warnings(compiled, byte_tokenizer())
    )
    return messages[0] if is_error else ""


def emptiness(compiled: str) -> str:
    """Why a valid grammar cannot begin: "nothing" where it has no text, or what limit it exceeds;
    empty where it can."""
    walk = matcher(compiled)
    mask = walk.compute_bitmask()
    if walk.is_error():
        reason = walk.get_error()
        return "nothing" if reason.startswith("NoExtension") else meaning(reason)
    return "" if walk.is_accepting() or _allowed(mask) else "nothing"


def consume(walk: LLMatcher, data: bytes) -> int:
    """How many bytes of `data` the walk could take. Raises ConstraintError when a limit is hit."""
    begun = now = time.monotonic()
    at, size = 0, _CHUNK
    while at < len(data):
        part = data[at : at + size]
        taken = walk.try_consume_tokens(list(part))
        _check(walk)
        at += taken
        if taken < len(part):
            break
        before, now = now, time.monotonic()
        size = _CHUNK if now - before < _SLOW else 1
        if now - begun > MOST_SECONDS:
            took = f"{at:,} bytes took more than {MOST_SECONDS:g} s"
            if at > _MANY_BYTES:
                raise ConstraintError(f"the text is too long: {took}, and it has {len(data):,}")
            raise ConstraintError(
                f"the grammar is too ambiguous: {took}; prefer `item+` to "
                "`items: items items | item`"
            )
    return at


def ends(walk: LLMatcher, data: bytes, start: int) -> list[int]:
    """Where the texts of a grammar end that begin at `start`, the last place first.

    walk: at the beginning of a text; it is moved. Raises ConstraintError when a limit is hit.
    """
    found = [start] if walk.is_accepting() else []
    at = start
    while at < len(data) and walk.try_consume_tokens([data[at]]):
        at += 1
        if walk.is_accepting():
            found.append(at)
    _check(walk)
    return found[::-1]


def forced(compiled: str) -> str:
    """The text that every text of the grammar begins with; whole characters."""
    return matcher(compiled).compute_ff_bytes().decode("utf-8", errors="ignore")


def examples(compiled: str, n: int, seed: int) -> list[str]:
    """Up to n different texts of the grammar, the same for the same seed.

    Fewer where the grammar has fewer, or where a random walk does not find more.
    Raises ConstraintError if it finds none, with what was in the way.
    """
    draw = random.Random(seed)
    found: dict[str, None] = {}
    misses = 0
    lost = ""
    end = time.monotonic() + MOST_SECONDS
    while len(found) < n and misses < _MOST_MISSES and time.monotonic() < end:
        text, why = _example(compiled, draw, misses, end)
        lost = why or lost
        if why == _ALL_LONG:
            break
        if why or text in found:
            misses += 1
        else:
            found[text] = None
            misses = 0
    if not found and n:
        raise ConstraintError(f"no example found: {lost}")
    return list(found)


_ALL_LONG = f"every text has more than {_EXAMPLE_BYTES:,} bytes, the most of an example"
_LONG = (
    f"no random walk came to an end within {_EXAMPLE_BYTES:,} bytes: texts may have to be longer, "
    "or few of many ways lead to an end"
)
_DEAD = "all random walks came to where nothing can follow"
_NO_TEXT = "what it allows are bytes that are no text: `~` allows all else, not only characters"


def _example(compiled: str, draw: random.Random, misses: int, end: float) -> tuple[str, str]:
    """One random walk to an accepted text, and why there is none where it got lost.

    misses: walks that found nothing since the last that did; walks take turns in
    what they prefer, for what one never finds another may. end: when to stop.
    """
    walk = matcher(compiled)
    text = bytearray()
    soft = draw.randrange(_SOFT_BYTES)
    while len(text) < _EXAMPLE_BYTES and time.monotonic() < end:
        ahead = walk.compute_ff_bytes()
        if ahead:
            if len(ahead) > _EXAMPLE_BYTES and not text:
                return "", _ALL_LONG
            text += ahead
            if len(text) > _EXAMPLE_BYTES:
                return "", _LONG
            if walk.try_consume_tokens(list(ahead)) < len(ahead):
                return "", _why_lost(walk)
        late = len(text) >= soft
        if walk.is_accepting() and (late or draw.random() < 0.3):
            return _as_text(text)
        allowed = _allowed(walk.compute_bitmask())
        if walk.is_error() or not allowed:
            return _as_text(text) if walk.is_accepting() else ("", _why_lost(walk))
        ways = (_LATE if late else _EARLY), None, _EARLY, None
        way = ways[misses % len(ways)]
        byte = draw.choices(allowed, None if way is None else _weights(allowed, way))[0]
        text.append(byte)
        walk.consume_token(byte)
    return "", _LONG


def _as_text(data: bytearray) -> tuple[str, str]:
    try:
        return data.decode(), ""
    except UnicodeDecodeError:  # the complement of a regular expression has bytes of all kinds
        return "", _NO_TEXT


def _why_lost(walk: LLMatcher) -> str:
    reason = walk.get_error()
    return _DEAD if not reason or reason.startswith("NoExtension") else meaning(reason)


def closing(walk: LLMatcher, *, steps: int = 500) -> bytes | None:
    """A short way from where a byte-wise walk stands to an accepted text; None where none is found
    in so many steps, which are bytes that are not forced.

    Bytes that are likely to lead on are tried, and where that finds nothing soon all of them. The
    walk stays where it is. What a step may cost is limited; a grammar whose steps all cost that
    much is given up after MOST_SECONDS of computing, however busy the machine is.
    """
    if walk.is_accepting():
        return b""
    end = time.thread_time() + MOST_SECONDS
    for ways_on, most in ((_ways_on, 60), (_all_ways_on, 100), (_ways_on, steps)):
        if (found := _search(walk, min(most, steps), end, ways_on)) is not None:
            return found
    return None


def _search(
    walk: LLMatcher, steps: int, end: float, ways_on: Callable[[list[int]], dict[int, float]]
) -> bytes | None:
    """A beam search: of the ways that are as many steps long those stay that look shortest, and of
    those behind which the same bytes may come one.

    end: when to stop, in seconds of this thread. ways_on: which of the bytes that are allowed are
    tried, and what they cost.
    """
    start = walk.deep_copy()
    ways: list[_Way] = [(0.0, b"", start, start.compute_bitmask())]
    for _ in range(steps):
        further: list[_Way] = []
        for cost, text, at, mask in reversed(ways):  # of equals those that came far first
            allowed = _allowed(mask)
            costs = ways_on(allowed)
            least = min(costs.values(), default=0.0) - (_LINGER if len(allowed) >= _MANY else 0.0)
            for byte, own in costs.items():
                on = at.deep_copy()
                if not on.consume_token(byte):
                    continue
                ahead = on.compute_ff_bytes()
                if ahead and on.try_consume_tokens(list(ahead)) < len(ahead):
                    continue
                more = own - least - min(_PROGRESS * len(ahead), _MOST_PROGRESS)
                further.append(
                    (cost + more, text + bytes([byte]) + ahead, on, on.compute_bitmask())
                )
        done = [text for _, text, at, _ in further if at.is_accepting()]
        if done:
            return min(done, key=len)
        ways = _different(further)
        if not ways or time.thread_time() > end:
            break
    return None


def _different(ways: list[_Way]) -> list[_Way]:
    """The cheapest ways, one for each set of bytes that may come next before a second one."""
    times: dict[bytes, int] = {}
    ranked = []
    for place, way in enumerate(sorted(ways, key=lambda way: round(way[0], 6))):
        times[way[3]] = times.get(way[3], 0) + 1
        ranked.append((times[way[3]], place, way))
    return [way for *_, way in sorted(ranked, key=lambda each: each[:2])[:_CLOSING_WAYS]]


_CLOSING_WAYS = 8
_CLOSING = {"letter": 1.5, "sign": 1.5, "other": 4.0, "open": 4.0, "close": 1.0, "space": 3.0}
_COMMA_BYTE, _NEWLINE, _AT = b",\n@"
_COMMA = 1.3  # ends a number where no bracket can; a newline ends words, elsewhere it is a space
_PROGRESS, _MOST_PROGRESS = 0.1, 1.0  # what is forced behind a byte speaks for it
_LINGER = 0.02  # of equal ways the one that left some content first is nearer to the end
_MANY = 60  # where so many bytes are allowed they are the content of something


def _ways_on(allowed: list[int]) -> dict[int, float]:
    """Bytes to go on with towards an end, and what they cost: of each kind the first and the last,
    the end of the line, and all that close something. Within a string only its quote does."""
    kinds: dict[str, list[int]] = {}
    for byte in allowed:
        kinds.setdefault(_kind(byte), []).append(byte)
    closing_bytes = kinds.pop("close", [])
    if len(allowed) >= _MANY:
        if len(kinds) > 1:  # else it is the middle of a character
            kinds.pop("other", None)
        closing_bytes = [byte for byte in closing_bytes if byte in b'"']
    some = [byte for bytes_ in kinds.values() for byte in (bytes_[0], bytes_[-1])]
    costs = {byte: _CLOSING[_kind(byte)] for byte in closing_bytes + some}
    if _AT in allowed:  # the only way on in an address, among all that may stand before it
        costs[_AT] = _CLOSING["sign"]
    if _NEWLINE in allowed:
        costs[_NEWLINE] = _COMMA if {*b"az"} <= {*allowed} else _CLOSING["space"]
    if _COMMA_BYTE in costs:
        costs[_COMMA_BYTE] = _COMMA
    return costs


def _all_ways_on(allowed: list[int]) -> dict[int, float]:
    return {byte: _COMMA if byte == _COMMA_BYTE else _CLOSING[_kind(byte)] for byte in allowed}


def _weights(allowed: list[int], weights: dict[str, float]) -> list[float]:
    """How gladly an example goes on with each byte: with letters at first, and later with what
    closes something. A kind of bytes has one weight, however many of them there are."""
    kinds = [_kind(byte) for byte in allowed]
    return [weights[kind] / kinds.count(kind) for kind in kinds]


_EARLY = {"letter": 10.0, "sign": 2.0, "other": 1.0, "open": 2.0, "close": 1.5, "space": 0.2}
_LATE = {"letter": 1.0, "sign": 0.2, "other": 0.1, "open": 0.001, "close": 50.0, "space": 0.01}


def _kind(byte: int) -> str:
    if byte in b"\"]})'":
        return "close"
    if byte in b"[{(,\\":
        return "open"
    if byte in b" \t\r\n":
        return "space"
    if byte >= 0x7F or byte < 0x20:
        return "other"
    return "letter" if chr(byte).isalnum() else "sign"


def _allowed(mask: bytes) -> list[int]:
    return [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]


def _check(walk: LLMatcher) -> None:
    if walk.is_error() and not (reason := walk.get_error()).startswith("NoExtension"):
        raise ConstraintError(f"the constraint is too complex for this text: {meaning(reason)}")
