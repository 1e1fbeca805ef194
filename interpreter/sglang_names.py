"""The names that SGLang's states have for what is said otherwise here.

A base of `ProgramState`; each is a few lines on `BranchReader`. What `get_meta_info` returns has
SGLang's keys.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, overload

from stemma.interpreter.meta import Meta, ScoreMeta, SelectMeta
from stemma.interpreter.reader import BranchReader
from stemma.lang.errors import InvalidArgument

MetaInfo = dict[str, Any]


class SglangNames(BranchReader):
    """`get_var`, `set_var`, `get_meta_info`, `sync`, `error`, `ret_value`, `text_async_iter`."""

    def get_var(self, name: str) -> Any:
        """SGLang's `s[name]`."""
        return self[name]

    def set_var(self, name: str, value: Any) -> None:
        """SGLang's `s[name] = value`."""
        self._define(name, value)

    def get_meta_info(self, name: str) -> Any:
        """`s.meta(name)` as a dict with SGLang's keys; a list of them where there are several."""
        return meta_info(self.meta(name))

    def sync(self) -> None:
        """Wait until everything queued on this branch is done, well or not."""
        self._wait_until_idle()

    def error(self) -> BaseException | None:
        """What this branch has failed by, after all that is queued is done."""
        self._wait_until_idle()
        error = self._executor.error
        if error is not None:
            self._run.note_seen(error)
        return error

    @property
    def ret_value(self) -> Any:
        """SGLang's `s.value`."""
        return self.value

    @overload
    def text_async_iter(
        self, var_name: str | None = None, return_meta_data: Literal[False] = False
    ) -> AsyncIterator[str]: ...
    @overload
    def text_async_iter(
        self, var_name: str, return_meta_data: Literal[True]
    ) -> AsyncIterator[tuple[str, Any]]: ...
    def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[str] | AsyncIterator[tuple[str, Any]]:
        """`text_iter` for `async for`.

        return_meta_data: each piece of a variable with its meta info. That is there with the last
        piece; before it is an empty dict, and each piece comes when the next one is there.
        """
        if not return_meta_data:
            return self._text_async_iter(var_name)
        if var_name is None:
            raise InvalidArgument("text_async_iter(return_meta_data=True) needs a variable's name")
        return self._with_meta_info(var_name)

    async def _with_meta_info(self, name: str) -> AsyncIterator[tuple[str, Any]]:
        held: str | None = None
        async for piece in self._text_async_iter(name):
            if held is not None:
                yield held, {}
            held = piece
        if held is not None:
            await self._variable(name).wait_async()
            yield held, self.get_meta_info(name)


def meta_info(meta: Any) -> Any:
    """Meta with SGLang's names. Rows of log-probabilities are (logprob, token id, None)."""
    match meta:
        case Meta():
            return _of_generation(meta)
        case SelectMeta():
            return _of_choice(meta)
        case ScoreMeta():
            return {
                "prompt_tokens": meta.usage.prompt_tokens,
                "cached_tokens": meta.usage.cached_tokens,
            }
        case list():
            return [meta_info(one) for one in meta]
    return None


def _of_generation(meta: Meta) -> MetaInfo:
    kinds = {"stop": "stop", "length": "length", "cancelled": "abort"}
    finish: MetaInfo = {"type": kinds[meta.finish_reason]}
    if meta.finish_reason == "stop":
        finish["matched"] = meta.matched_stop
    elif meta.finish_reason == "length":
        finish["length"] = meta.usage.output_tokens
    info = {
        "prompt_tokens": meta.usage.prompt_tokens,
        "cached_tokens": meta.usage.cached_tokens,
        "completion_tokens": meta.usage.output_tokens,
        "e2e_latency": meta.usage.total_s,
        "finish_reason": finish,
    }
    if meta.logprobs is not None:
        info["output_token_logprobs"] = _rows(
            [token.logprob for token in meta.logprobs], [token.token_id for token in meta.logprobs]
        )
        if any(token.top for token in meta.logprobs):
            info["output_top_logprobs"] = [
                [(logprob, token_id, None) for token_id, logprob in token.top]
                for token in meta.logprobs
            ]
    return info


def _of_choice(meta: SelectMeta) -> MetaInfo:
    info: MetaInfo = {
        "normalized_prompt_logprobs": [_mean(choice.logprobs) for choice in meta.choices],
        "input_token_logprobs": [_rows(c.logprobs, c.token_ids) for c in meta.choices],
        "output_token_logprobs": [[] for _ in meta.choices],
    }
    if meta.method.needs_unconditional:
        info["unconditional_token_logprobs"] = [
            _rows(c.unconditional or (), c.token_ids) for c in meta.choices
        ]
        info["normalized_unconditional_prompt_logprobs"] = [c.score for c in meta.choices]
    return info


def _rows(logprobs: Sequence[float], token_ids: Sequence[int]) -> list[tuple[float, int, None]]:
    return [(logprob, i, None) for logprob, i in zip(logprobs, token_ids, strict=True)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
