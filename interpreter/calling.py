"""`s.call(tools=[...])`: the model writes a call of a Python function, the function runs, and what
it returns is appended for the model to read.

A base of `ProgramState`. What a tool is and the shape of a call are `lang/tools.py`'s; how a model
wants both written is its chat format's.
"""

from __future__ import annotations

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from stemma.interpreter.sglang_names import SglangNames
from stemma.interpreter.tasks import Call, Define
from stemma.interpreter.tracing import TracingBackend, placeholder
from stemma.interpreter.variable import Variable
from stemma.lang.errors import InvalidArgument
from stemma.lang.gen import gen
from stemma.lang.ops import Chain, Expr, Gen, Operation, RoleBegin, RoleEnd, Text, operations
from stemma.lang.primitives import check_name
from stemma.lang.tools import (
    PLAIN,
    CallReader,
    Tool,
    ToolCall,
    told_error,
    told_result,
    tools_constraint,
    tools_of,
)

if TYPE_CHECKING:
    from stemma.backend.chat_tools import ToolPieces

Tools = Sequence[Callable[..., Any] | Tool]
OnToolError = Literal["observe", "raise"]

OBSERVATION = "\nObservation: {}\n"
_OURS = ("choices", "constraint", "dtype", "grammar", "json_schema", "n", "regex", "whitespace")
_SETTINGS = inspect.signature(gen).parameters


class Calling(SglangNames, ABC):
    """`call`, `acall` and `tools`."""

    _open_role: str | None
    _roles: list[str]

    @abstractmethod
    def append(self, value: str | Expr) -> None: ...

    def call(
        self,
        tools: Tools,
        name: str = "call",
        *,
        result: str | None = None,
        on_error: OnToolError = "observe",
        **settings: Any,
    ) -> ToolCall:
        """Let the model call one of the tools, run that, and append what it returns.

        The model can write nothing but a valid call, and the tool gets typed arguments. Waits for
        the call and the tool. The variable `name` is what is returned, with the text of the call in
        `s.raw(name)`.

        tools: functions with annotations and a docstring, or `Tool`s.
        result: what is appended, with `{}` for what the tool returns: a str as it is, other values
            as JSON. Then the call is plain text, too: `price({"thing": "lamp"})`. Without `result`
            both are in the model's own format where its chat template has one and the branch has
            messages: the call in an assistant's message, a new one unless one is open, the result
            in one of its own. Else the call is plain text and `result` is OBSERVATION; where there
            are messages and none is open, the assistant says the call and the user the result.
            Of a tool that returns None, nothing is appended (in plain text the line is ended).
        on_error: what becomes of an exception in the tool, in a validator of its arguments, or of a
            result that cannot be told. "observe" appends its type and text in place of the result;
            "raise" raises it, with nothing appended.
        settings: of `gen`, as `max_tokens` and `temperature`.

        Raises InvalidArgument for what is no tool, for an async tool (that is for `acall`), and
        inside of a system's or user's message; Truncated where `max_tokens` cuts off the call.

        >>> while (call := s.call([price, answer])).name != "answer":  # doctest: +SKIP
        ...     print(call.arguments, call.result)
        """
        calling = _Call(self, tools, name, result, on_error, settings)
        calling.refuse_async_tools()
        for variable in calling.write():
            self._run.wait(variable)
        with calling.trying():
            calling.take(calling.run())
        return calling.end()

    async def acall(
        self,
        tools: Tools,
        name: str = "call",
        *,
        result: str | None = None,
        on_error: OnToolError = "observe",
        **settings: Any,
    ) -> ToolCall:
        """`call` for async programs; tools may be async functions, which are awaited. Others run on
        the event loop."""
        calling = _Call(self, tools, name, result, on_error, settings)
        for variable in calling.write():
            await variable.wait_async()
        with calling.trying():
            value = calling.run()
            calling.take(await value if inspect.isawaitable(value) else value)
        return calling.end()

    def tools(self, tools: Tools) -> Chain:
        """What tells the model of the tools: by its chat template's own words, else a line for
        each.

        Belongs into a message, usually the system's. tools: as those of `call`. Raises
        InvalidArgument for what is no tool, and for one whose docstring or types spell a control
        token of the model.

        >>> s += st.system("You run a shop. " + s.tools([price]))  # doctest: +SKIP
        """
        known = tools_of(tools).values()
        chat, control_tokens = self._run.backend.chat, self._run.backend.control_tokens or ()
        for tool in known:
            if spelt := next((t for t in control_tokens if t in json.dumps(tool.schema())), None):
                raise InvalidArgument(
                    f"tool {tool.name}: its docstring or a type spells the control token "
                    f"{spelt!r}: write it otherwise"
                )
        told = chat.told_tools([tool.schema() for tool in known])
        if told is None:
            return Chain((Text("\n".join(map(_line, known))),))
        return Chain((_template_text(self, told),))


class _Call:
    """One call on its way: written, run, appended.

    tool_call: as the model has written it; at the end, with what has come of it. result: what the
    function has returned. told: that as text.
    """

    def __init__(
        self,
        state: Calling,
        tools: Tools,
        name: str,
        result: str | None,
        on_error: str,
        settings: dict[str, Any],
    ) -> None:
        _check(state, name, result, on_error, settings)
        self.state, self.name, self.settings = state, name, settings
        self.tools = tools_of(tools)
        if unknown := [key for key in settings if key not in _SETTINGS]:
            raise TypeError(f"call() got an unexpected keyword argument {unknown[0]!r}")
        self.raises = on_error == "raise"
        self.observation = OBSERVATION if result is None else result
        self.pieces = _own_pieces(state) if result is None else None
        # In an open message; in a message of its own; or else in plain text.
        self.inside = state._open_role is not None
        self.alone = not self.inside and bool(state._roles)
        self.result: Any = None
        self.told: str | None = None

    def refuse_async_tools(self) -> None:
        for tool in self.tools.values():
            if tool.is_async:
                raise InvalidArgument(
                    f"tool {tool.name} is async, and s.call does not await: make the program "
                    "`async def` and write `await s.acall(...)`"
                )

    def write(self) -> Iterator[Variable]:
        """Let the model write the call; yields what is to be waited for."""
        state, form = self.state, PLAIN if self.pieces is None else self.pieces.call
        before = form.before
        if self.inside and form.behind != before:
            yield state._executor.until_idle()
            messages = state._executor.transcript.messages()
            if messages and messages[-1]["content"]:  # none where the branch has failed before
                before = form.behind
        drawn, closing = _cut_before_control(state, form.after)
        shape = tools_constraint(self.tools.values(), replace(form, after=drawn))
        self.read = cast(CallReader, shape.read)
        (written,) = operations(gen(self.name, n=1, constraint=shape, **self.settings))
        call = (
            *([_template_text(state, before)] if before else []),
            Call.of(cast(Gen, written)),
            *([_template_text(state, closing)] if closing else []),
        )
        state.append(Chain(_message("assistant", call) if self.alone else call))
        yield state._variable(self.name)
        self.tool_call: ToolCall = state[self.name]

    def run(self) -> Any:
        """What the function returns; of an async one what is to be awaited. In a trace the
        arguments are made up, and nothing is run."""
        if isinstance(self.state._run.backend, TracingBackend):
            return placeholder(self.tool_call.name)
        if self.tool_call.error is None:
            return self.tools[self.tool_call.name].function(**self.tool_call.arguments)
        if self.raises:
            self.read.arguments(self.tool_call.text)  # raises what the types have raised
            raise InvalidArgument(f"its types do not take the arguments: {self.tool_call.error}")
        return None

    def take(self, value: Any) -> None:
        """Keep what the function has returned, and what the model is told of it; of an iterator a
        list, since it can be read only once."""
        self.result = list(value) if isinstance(value, Iterator) else value
        if inspect.iscoroutine(value):
            return
        try:
            self.told = told_result(self.result)
        except InvalidArgument as error:
            raise InvalidArgument(f"tool {self.tool_call.name}: {error}") from error

    @contextmanager
    def trying(self) -> Iterator[None]:
        """An exception is noted; it is passed on where the program wants that."""
        try:
            yield
        except Exception as error:
            self.tool_call = replace(self.tool_call, error=told_error(error))
            if self.raises:
                self._keep()
                error.add_note(f"in tool {self.tool_call.name}, called as {self.tool_call.text!r}")
                raise

    def end(self) -> ToolCall:
        """Append what came out, and keep the call as the variable's value."""
        if inspect.iscoroutine(self.result):
            self.result.close()
            self._keep()
            raise InvalidArgument(
                f"tool {self.tool_call.name} returned a coroutine, of which nothing has run: write "
                "it as `async def`, and `await s.acall(...)`"
            )
        observed = self.tool_call.error or self.told
        self.tool_call = replace(self.tool_call, result=self.result, observation=observed)
        self.state.append(self._observed(observed))
        self._keep()
        return self.tool_call

    def _observed(self, text: str | None) -> Chain:
        if self.pieces is None:
            if text is None:
                line = "\n" if self.observation.startswith("\n") and not self.alone else ""
                return Chain(operations(line))
            said = self.observation.replace("{}", text)
            if self.alone:
                return Chain(_message("user", operations(said.strip("\n"))))
            return Chain(operations(said))
        if text is None:
            return Chain(())
        content = json.dumps(text, ensure_ascii=False)[1:-1] if self.pieces.quoted else text
        message = _message("tool", operations(content))
        if self.inside:
            return Chain((RoleEnd("assistant"), *message, RoleBegin("assistant")))
        return Chain(message)

    def _keep(self) -> None:
        state, written = self.state, self.state._variable(self.name)
        variable = Variable.of(self.tool_call, raw=written.raw, meta=written.meta)
        variable.streamed = True
        state._follow(self.name, variable, state._own)
        if state._run.feed is not None:
            state._executor.enqueue((Define(self.name, self.tool_call), None))


def _check(
    state: Calling, name: object, result: object, on_error: object, settings: dict[str, Any]
) -> None:
    if name is None:
        raise InvalidArgument("call(name=None): what it returns needs a variable: name it")
    check_name("call", name)
    if on_error not in get_args(OnToolError):
        raise InvalidArgument(f"call(on_error={on_error!r}): must be 'observe' or 'raise'")
    if result is not None and (not isinstance(result, str) or result.count("{}") != 1):
        raise InvalidArgument(
            f"call(result={result!r}): must be a text with one {{}} in it, for what the tool "
            "returns, as '\\nObservation: {}\\n'"
        )
    if beyond := [key for key in _OURS if key in settings]:
        raise InvalidArgument(
            f"call({beyond[0]}=...): the tools alone say what a call may be, and it is one: leave "
            "it out"
        )
    if state._open_role not in (None, "assistant"):
        raise InvalidArgument(
            f"call: inside of a {state._open_role} message, and it is the assistant who calls: "
            f"close it first, with st.{state._open_role}_end() or at the end of its block"
        )


def _own_pieces(state: Calling) -> ToolPieces | None:
    """How the model's template writes calls, where this branch has messages and it can."""
    if state._open_role is None and not state._roles:
        return None
    pieces = state._run.backend.chat.tools()
    if pieces is None or _cut_before_control(state, pieces.call.between)[1]:
        return None
    return pieces


def _cut_before_control(state: Calling, text: str) -> tuple[str, str]:
    """A text before and from its first control token on: those a constraint cannot contain."""
    known = state._run.backend.control_tokens or ()
    at = min((at for token in known if (at := text.find(token)) >= 0), default=len(text))
    return text[:at], text[at:]


def _template_text(state: Calling, text: str) -> Text:
    """Text of a chat template, in which control tokens are meant."""
    known = state._run.backend.control_tokens
    return Text(text, control=known is None or any(token in text for token in known))


def _message(role: str, content: tuple[Operation, ...]) -> tuple[Operation, ...]:
    return (RoleBegin(role), *content, RoleEnd(role))


def _line(tool: Tool) -> str:
    """A tool as a model without a format of its own is told of it."""
    parameters = tool.parameters
    listed = parameters if "$defs" in parameters else parameters["properties"]
    description = " ".join(tool.description.split())
    return f"{tool.name}({json.dumps(listed, ensure_ascii=False)}): {description}".rstrip(": ")
