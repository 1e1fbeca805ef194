"""Taking a chat template apart: the pieces it puts around contents, and where it does more than
that.

Owns what is known of one template's pieces. Called by `chat.py` only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stemma.backend.chat_template import ChatTemplate, Message, Refused

_LONG = 8  # turns; of a longer conversation the last ones tell how the next is opened
_ROLES = ("system", "user", "assistant")
# Conversations to compare on, each with and without a generation prompt as its last turn suggests.
_SHAPES: tuple[tuple[str, ...], ...] = (
    ("user",),
    ("user", "assistant"),
    ("user", "assistant", "user"),
    ("user", "assistant") * 7,
    ("user", "assistant") * 7 + ("user",),
    ("system", "user"),
    ("system", "user", "assistant", "user"),
    ("system", *("user", "assistant") * 7, "user"),
)
_CONTENTS = {
    "trims": " \n {} \n ",
    "changes markup in": "a < b & {{c}} {% d %} <br> \"e\" 'f' \\n {}",
    "changes non-ASCII text in": "e\u0301 中文 🙂 \u00a0{}",
    "changes or drops reasoning in earlier": "<think>\nwhy\n</think>\n\n{}",
}


class TemplatePieces:
    """Pieces found by rendering conversations of marked contents.

    Each is found when it is first asked for, and kept: a template that writes the time of day still
    gives one prefix.

    An assistant turn opens with the template's generation prompt. Where it has none, with what it
    puts before an assistant's text, without trailing spaces: the first token of a reply brings its
    own.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._begins: dict[tuple[str, tuple[str, ...]], str] = {}
        self._ends: dict[str, str] = {}

    def begin(self, role: str, previous: Sequence[str]) -> str:
        """What opens a turn of `role` after turns of the roles `previous`. Raises Refused."""
        key = (role, recent(previous))
        if key not in self._begins:
            first: Refused | None = None
            for before in _contexts(previous):
                try:
                    self._begins[key] = self._opening(role, before)
                    break
                except Refused as error:
                    first = first or error
            else:
                assert first is not None
                raise first
        return self._begins[key]

    def end(self, role: str) -> str:
        """What closes a turn of `role`, whatever follows. Raises Refused."""
        if role not in self._ends:
            self._ends[role] = self._closing(role)
        return self._ends[role]

    def _opening(self, role: str, before: tuple[str, ...]) -> str:
        end = self.end(before[-1]) if before else ""
        if role == "assistant" and before:
            prompted = self._try(before, add_generation_prompt=True)
            if prompted is not None and prompted[-1] != end and prompted != self._try(before):
                return _after(end, prompted[-1], before)
        opening = _after(end, self._frame_within((*before, role))[len(before)], before)
        if role != "assistant":
            return opening
        if not before:  # of what stands in front, up to where a reply is prompted elsewhere
            prompt = self.begin("assistant", ("user",))
            opening = (
                opening[: opening.rfind(prompt) + len(prompt)] if prompt in opening else opening
            )
        return opening.rstrip(" ")

    def _closing(self, role: str) -> str:
        refused: Refused | None = None
        for before in _ways_to(role):
            turns = (*before, role)
            try:
                closing = self._template.frame(turns)[-1]
            except Refused as error:  # a system turn that is written together with the next
                refused = refused or error
                continue
            followed = [self._try((*turns, after)) for after in _ROLES[1:]]
            behind = [frame[len(turns)] for frame in followed if frame is not None]
            prompted = self._try(turns, add_generation_prompt=True)
            behind += [prompted[-1]] if prompted is not None else []
            # Some templates end a text that is not to be continued with the end-of-text token.
            for end in (closing, closing.removesuffix(self._template.eos_token or "")):
                if all(text.startswith(end) for text in behind):
                    return end
            refused = Refused(
                f"what the template puts behind a {role} turn depends on what follows"
            )
        try:
            return self._frame_within((role,))[1]
        except Refused as error:
            raise refused or error from None

    def _frame_within(self, turns: tuple[str, ...]) -> tuple[str, ...]:
        """The frame of the turns, with more of them behind where the template needs that. Raises
        Refused."""
        refused: Refused | None = None
        for more in ((), ("user",), ("assistant",)):
            try:
                return self._template.frame((*turns, *more))
            except Refused as error:
                refused = refused or error
        assert refused is not None
        raise refused

    def _try(
        self, turns: tuple[str, ...], add_generation_prompt: bool = False
    ) -> tuple[str, ...] | None:
        try:
            return self._template.frame(turns, add_generation_prompt)
        except Refused:
            return None

    # What the template does otherwise

    def differences(self) -> list[str]:
        """A sentence for each way in which the template's own rendering differs from these
        pieces."""
        found: dict[str, None] = {}  # in order, each once
        for shape in _SHAPES:
            found |= dict.fromkeys(self._frame_differences(shape))
        for role in _ROLES:
            found |= dict.fromkeys(self._content_differences(role))
        for shape in (("user", "user"), ("user", "assistant", "assistant")):
            found |= dict.fromkeys(self._frame_differences(shape))
        return list(found)

    def _frame_differences(self, turns: tuple[str, ...]) -> Iterator[str]:
        """Piece by piece, what stands around the contents of one conversation."""
        prompt = turns[-1] == "user"
        try:
            theirs = self._template.frame(turns, prompt)
        except Refused as refused:
            yield str(refused)
            return
        end, last = "", None
        for n, role in enumerate((*turns, "assistant") if prompt else turns):
            try:
                ours = end + self.begin(role, turns[:n])
                end = self.end(role)
            except Refused as refused:
                yield str(refused)
                return
            if theirs[n] != ours:
                what = (
                    "the text of an assistant"
                    if role == "assistant" and n < len(turns)
                    else f"a {role}"
                )
                where = f"after {last}" if last else "at the start"
                yield f"before {what} turn {where} the template puts {theirs[n]!r}, not {ours!r}"
            last = role
        if not prompt and theirs[-1] != end:
            yield f"at the end, after {last}, the template puts {theirs[-1]!r}, not {end!r}"

    def _content_differences(self, role: str) -> Iterator[str]:
        for shape in (("system", "user", "assistant", "user"), ("user", "assistant", "user")):
            frame = self._try(shape)
            if frame is not None and role in shape:
                break
        else:
            return
        for what, pattern in _CONTENTS.items():
            if "reasoning" in what and role != "assistant":
                continue
            contents = [pattern.replace("{}", "x") if r == role else "y" for r in shape]
            if self._render(shape, contents) != _joined(frame, contents):
                yield f"the template {what} {role} turns; here contents stay as they are"

    def _render(self, shape: Sequence[str], contents: Sequence[str]) -> str | None:
        messages: list[Message] = list(zip(shape, contents, strict=True))
        try:
            return self._template.render(messages)
        except Refused:
            return None


def _after(end: str, text: str, before: Sequence[str]) -> str:
    """What opens a turn: `text` stands between two contents, `end` closes the first."""
    if not text.startswith(end):
        raise Refused(f"what the template puts behind a {before[-1]} turn depends on what follows")
    return text[len(end) :]


def recent(previous: Sequence[str]) -> tuple[str, ...]:
    """A short conversation that the next turn follows alike: first, last and parity stay."""
    system = tuple(previous[:1]) if previous and previous[0] == "system" else ()
    turns = tuple(previous[len(system) :])
    if len(turns) > _LONG:
        turns = turns[(len(turns) - _LONG + 1) // 2 * 2 :]
    return system + turns


def _contexts(previous: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """What to render before a new turn, the best first.

    All of it if the short form is refused; no system turn if the template moves that behind turns
    which are written already.
    """
    yield recent(previous)
    if len(previous) > _LONG:
        yield tuple(previous)
    others = tuple(role for role in previous if role != "system")
    if others and len(others) < len(previous):
        yield recent(others)


def _ways_to(role: str) -> tuple[tuple[str, ...], ...]:
    """Conversations after which a turn of `role` is likely to be accepted."""
    if role == "assistant":
        return ("user",), (), ("system", "user")
    if role in _ROLES:
        return (), ("system",)
    return ("user", "assistant"), ("user",), ()


def _joined(frame: Sequence[str], contents: Sequence[str]) -> str:
    pairs = zip(frame, contents, strict=False)
    return "".join(around + content for around, content in pairs) + frame[-1]
