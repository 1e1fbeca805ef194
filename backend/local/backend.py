"""`LocalBackend`: the local engine as a `Backend`. Builds the floor below once, and turns prompts
into requests.
"""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from stemma.backend.base import Backend, Branch, CacheMode, Completion, Namespace
from stemma.backend.local.attention.executor import Attention
from stemma.backend.local.attention.torch_attention import TorchAttention
from stemma.backend.local.branch import LocalBranch
from stemma.backend.local.cache.eviction import POLICIES
from stemma.backend.local.cache.kv_pool import KVPool
from stemma.backend.local.cache.radix_cache import RadixCache
from stemma.backend.local.cache.snapshot import TreeSnapshot
from stemma.backend.local.constrain import Constrainer
from stemma.backend.local.conventions import (
    chat_format,
    end_ids,
    reasoning_marks,
    recommended_sampling,
)
from stemma.backend.local.detokenize import OutputText
from stemma.backend.local.engine import Engine, refuse_forked_process
from stemma.backend.local.handing_in import hand_in
from stemma.backend.local.literal import Literal
from stemma.backend.local.memory import RequestMemory
from stemma.backend.local.metrics import Stats
from stemma.backend.local.model.default_model import resolve_model
from stemma.backend.local.model.loader import LoadedModel, load_model
from stemma.backend.local.model.quantize import QuantizationMode, check_quantization
from stemma.backend.local.native.attention import NativeAttention, kv_dtype, works
from stemma.backend.local.native.build import CompileMode, kernels
from stemma.backend.local.native.layers import compiled_layers
from stemma.backend.local.native.linears import use_few_rows_linears
from stemma.backend.local.native.masks import masking
from stemma.backend.local.offline import complete
from stemma.backend.local.pins import Clock, Pin, pin_prefix
from stemma.backend.local.reloading import reload_weights
from stemma.backend.local.request import CacheUse, Ints, Request, check_namespace
from stemma.backend.local.scheduler import Scheduler
from stemma.backend.local.sizing import choose_device, choose_dtype, make_pool
from stemma.backend.local.speculation import Speculation
from stemma.backend.local.threads import on_own_thread
from stemma.backend.local.tokenizer import Tokenizer
from stemma.lang.errors import (
    ContextOverflow,
    InvalidArgument,
    OutOfCacheMemory,
)
from stemma.lang.sampling import DEFAULT_MAX_TOKENS, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LocalBackend(Backend):
    """A model in this process, every computed token kept in a radix tree over its KV cache.

    model: a folder with safetensors, a GGUF file, a hub id, or None for STEMMA_MODEL or the default
    model.
    device: "cuda" or "cpu"; None takes a GPU where there is one. dtype: None takes bfloat16 on a
    GPU and float32 on a CPU. quantization: "int8" multiplies in int8, several times faster on a
    CPU and a little less exact, see `model/quantize.py`; "auto" does so for weights that were
    quantised before (GGUF), None never.
    compile: "auto" uses the C++ kernels where there is a compiler to build them (once, in seconds)
    and they are right; True must have them; False goes without. For float32 on a CPU.
    kv_tokens: size of the KV pool; None takes a share of the memory that is free. `kv_dtype` tells
    what it holds: bfloat16 with int8 and the kernels, else `dtype`. page_size: tokens
    per page, the
        unit of sharing. prefix_cache: False computes every request from its first token on.
    policy: who is admitted first, "lpm", "dfs-weight", "fcfs" or "priority", see
    `waiting_order.py`. eviction: what leaves the cache first when memory is
    short: "program-aware", "lru", "lfu", "slru", "fifo", "filo", "mru" or "priority", see
    `cache/eviction.py`. max_pinned_share: most of the pool that `pin` may keep; clock: what pins go
    by, in seconds.
    max_running: requests that are in progress at once. max_step_tokens: most rows of one forward
    pass. speculation: compute tokens ahead where the cache or the text itself tells what comes, and
    it pays; changes no output, see `speculation.py`. jump_forward: write the tokens that a
    constraint leaves no choice about without drawing them; changes no output either.

    Raises ModelLoadError, and InvalidArgument for settings that cannot be meant.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        quantization: QuantizationMode = "auto",
        compile: CompileMode = "auto",
        kv_tokens: int | None = None,
        page_size: int = 1,
        prefix_cache: bool = True,
        policy: str = "lpm",
        eviction: str = "program-aware",
        max_pinned_share: float = 0.5,
        clock: Clock = time.monotonic,
        max_running: int = 256,
        max_step_tokens: int = 2048,
        speculation: bool = True,
        jump_forward: bool = True,
    ) -> None:
        if eviction not in POLICIES:
            raise InvalidArgument(f"eviction={eviction!r}: must be one of {', '.join(POLICIES)}")
        for name, value in (
            ("page_size", page_size),
            ("kv_tokens", 1 if kv_tokens is None else kv_tokens),
            ("max_running", max_running),
            ("max_step_tokens", max_step_tokens),
        ):
            if type(value) is not int or value < 1:
                raise InvalidArgument(f"{name}={value!r}: must be an integer of at least 1")
        for name, switch in (("speculation", speculation), ("jump_forward", jump_forward)):
            if type(switch) is not bool:
                raise InvalidArgument(f"{name}={switch!r}: must be True or False")
        refuse_forked_process()
        self.device = choose_device(device)
        self.dtype = choose_dtype(dtype, self.device)
        check_quantization(quantization, self.device, self.dtype)
        self._quantization = quantization
        self._kernels = kernels(compile, self.device, self.dtype)
        source = resolve_model(model)
        loaded = self.load(source)
        config = loaded.config
        self.config = config
        self._loads = 0
        self.set_version(loaded, source)
        self.text = Tokenizer.from_folder(loaded.folder)
        self.chat = chat_format(self.text)
        self.reasoning_marks = reasoning_marks(self.text)
        self.control_tokens = self.text.control_tokens
        self.end_ids = end_ids(self.text, self.chat)
        self._constrainer = Constrainer(self.text, config.vocab_size, jump_forward=jump_forward)
        pool, attention = on_own_thread(lambda: self._attention(kv_tokens, page_size))
        self.kv_dtype = pool.dtype
        self.eviction = eviction
        self.max_running = max_running
        memory = RequestMemory(
            pool.allocator,
            RadixCache(pool.allocator, eviction=POLICIES[eviction]()),
            prefix_cache=prefix_cache,
            max_pinned_share=max_pinned_share,
            clock=clock,
        )
        self.engine = Engine(
            loaded.decoder,
            attention,
            Scheduler(
                memory,
                policy=policy,
                max_running=max_running,
                max_step_tokens=max_step_tokens,
                speculation=Speculation(memory) if speculation else None,
            ),
            device=self.device,
            end_ids=self.end_ids,
            lower=None if self._kernels is None else masking(self._kernels),
        )
        self._finalizer = weakref.finalize(self, self.engine.close)

    def load(self, source: str | Path) -> LoadedModel:
        """A model as this backend runs it."""

        def work() -> LoadedModel:
            loaded = load_model(
                source, device=self.device, dtype=self.dtype, quantization=self._quantization
            )
            if self._kernels is not None:
                loaded.decoder.compiled = compiled_layers(self._kernels, loaded.decoder)
                use_few_rows_linears(self._kernels, loaded.decoder)
            return loaded

        return on_own_thread(work)

    def _attention(self, kv_tokens: int | None, page_size: int) -> tuple[KVPool, Attention]:
        """The KV pool, and what attends to it."""
        config, device, kernels = self.config, self.device, self._kernels
        heads, scale = config.num_heads, config.attention_scale
        dtype, shape = kv_dtype(self.quantization), (heads, config.num_kv_heads, config.head_dim)
        if kernels is not None and works(kernels, *shape, dtype=dtype):
            pool = make_pool(
                config, kv_tokens, page_size, dtype=dtype, device=device, heads_first=True
            )
            return pool, NativeAttention(kernels, pool, num_heads=heads, scale=scale)
        pool = make_pool(config, kv_tokens, page_size, dtype=self.dtype, device=device)
        return pool, TorchAttention(pool, num_heads=heads, scale=scale)

    def set_version(self, loaded: LoadedModel, source: str | Path) -> None:
        """Name the weights that are now in use. Every load has a version of its own, for a request
        made under the one before may still be on its way.
        """
        self.model_source = source
        self.model_name = loaded.name
        self.model_folder = loaded.folder
        self.quantization = loaded.quantization
        again = f"-{self._loads}" if self._loads else ""
        self.model_version = f"{loaded.version}{again}"
        self._loads += 1

    def model_sampling(self) -> SamplingParams:
        return recommended_sampling(self.model_folder, self.model_name)

    # -- programs

    def open(
        self,
        namespace: Namespace = Namespace(),
        *,
        cache: CacheMode = "read-write",
        priority: int = 0,
    ) -> Branch:
        """An empty branch. It and its forks share cached state within the namespace only.

        cache: "read" takes what is cached and leaves nothing there, "off" does neither. priority:
        the larger the dearer: with policy="priority" dearer requests run first, with
        eviction="priority" what dearer ones used is kept longest; all but 0 is refused where
        neither is set. No adapters can be loaded yet: one in the namespace is refused.
        """
        use = self._use(namespace, cache, priority)
        return LocalBranch(self, use, ids=[], literal=Literal(self.text, first=True))

    def _use(self, namespace: Namespace, cache: CacheMode, priority: int) -> CacheUse:
        order = self.engine.scheduler.order
        if priority and self.eviction != "priority" and not order.by_priority:
            raise InvalidArgument(
                f"priority={priority!r}: only policy='priority' and eviction='priority' look at "
                f"it, and this backend has {order.name!r} and {self.eviction!r}"
            )
        return CacheUse(namespace, cache, priority)

    # -- offline batches

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        *,
        prompt_logprobs: bool = False,
        namespace: Namespace = Namespace(),
        cache: CacheMode = "read-write",
        priority: int = 0,
    ) -> list[Completion]:
        """Complete each prompt `params.n` times; results prompt by prompt, samples of one prompt
        side by side.

        prompts: texts (control tokens in them are plain text) or lists of token ids. Never heals:
        ids go in as they are. prompt_logprobs: also report the log-probability of every prompt
        token from the second on. cache, priority: see `open`.
        All requests are handed to the engine together, in depth-first order of the tree of their
        prompts, which hits the cache as often as any order can. If one fails, the others are
        stopped and its error is raised; so is KeyboardInterrupt. With `params.seed` the samples of
        every prompt have the same seeds.
        """
        params = params or SamplingParams()
        self.engine.check_may_wait()
        use = self._use(namespace, cache, priority)
        listed = [prompts] if isinstance(prompts, str) else prompts
        ids = [self._prompt_ids(prompt) for prompt in listed]
        return complete(self, ids, params, use, prompt_logprobs=prompt_logprobs)

    def _prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes):
                raise InvalidArgument(
                    f"prompt {prompt!r}: prompts are texts, or lists of token ids each"
                )
            return [int(i) for i in prompt]
        literal = Literal(self.text, first=True).append(prompt)
        return self.with_bos(literal)

    def with_bos(self, literal: Literal, *, open_end: bool = False) -> list[int]:
        """The ids of a literal, behind BOS where it starts a text that the model wants to have one.

        open_end: as `Literal.open_ids`.
        """
        ids = literal.open_ids() if open_end else literal.ids()
        bos = self.text.bos_id
        return [bos, *ids] if literal.wants_bos and bos is not None else ids

    def encode(self, text: str, *, control: bool = False) -> list[int]:
        """The ids of a text, without BOS. Only with `control` do control tokens in it count as
        such.
        """
        return Literal(self.text, first=True).append(text, control=control).ids()

    def count_tokens(self, text: str) -> int:
        """How many tokens a text is on its own."""
        return len(self.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens spelled out."""
        return self.text.decode(ids)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The transformers tokenizer of the model, for callers that want one. The engine does not
        use it.
        """
        from transformers import AutoTokenizer

        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.model_folder)
        return tokenizer

    # -- requests

    @staticmethod
    def seed_of(params: SamplingParams) -> int:
        """The seed asked for, else a random one."""
        return random.getrandbits(63) if params.seed is None else params.seed

    def make_request(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        namespace: Namespace,
        *,
        on_finish: Callable[[Request], None],
        on_error: Callable[[BaseException], None],
        on_text: Callable[[str], None] | None = None,
        seed: int = 0,
        next_logprob: int | None = None,
        heal: npt.NDArray[np.int32] | None = None,
        scored: bool = False,
        cache: CacheMode = "read-write",
        priority: int = 0,
    ) -> Request:
        """A request that continues `ids`. Raises ContextOverflow or OutOfCacheMemory if it can
        never fit.
        """
        if not ids:
            raise InvalidArgument("the prompt has no tokens: there is nothing to continue")
        biased = [i for i, _ in params.logit_bias]
        size = self.config.vocab_size
        for what, found in (
            ("the prompt", ids),
            ("logit_bias", biased),
            ("stop_token_ids", params.stop_token_ids),
        ):
            if beyond := [i for i in found if not 0 <= i < size]:
                raise InvalidArgument(
                    f"token id {beyond[0]} of {what}: the vocabulary of {self.model_name} has "
                    f"{size} tokens, 0 to {size - 1}"
                )
        max_tokens = self._output_room(len(ids), params)
        samples = max_tokens > 0
        return Request(
            tokens=Ints(ids),
            namespace=self.versioned(namespace),
            cache=cache,
            priority=priority,
            params=params,
            on_finish=on_finish,
            on_error=on_error,
            on_text=on_text,
            seed=seed,
            samples=samples,
            scored=scored,
            next_logprob=next_logprob,
            heal=heal if samples else None,
            output=OutputText(self.text, params, end_ids=self.end_ids) if samples else None,
            max_tokens=max_tokens,
            prompt_top_logprobs=params.top_logprobs,
        )

    def _output_room(self, prompt: int, params: SamplingParams) -> int:
        """How many tokens may be sampled after the prompt."""
        context, pool = self.config.max_positions, self.engine.scheduler.memory.capacity
        wanted = params.max_tokens
        least = max(1, params.min_tokens) if wanted is None else wanted
        needed = prompt + least
        asked = f" and {least} to write" if least > 1 else ""
        if needed > context:
            raise ContextOverflow(
                f"a prompt of {prompt} tokens{asked} needs {needed} positions; the context of "
                f"{self.model_name} has {context}: shorten the prompt or lower max_tokens",
                needed=needed,
                limit=context,
            )
        if needed > pool:
            raise OutOfCacheMemory(
                f"a prompt of {prompt} tokens{asked} needs {needed} KV slots; the pool has {pool}: "
                "raise kv_tokens, shorten the prompt or lower max_tokens",
                needed=needed,
                limit=pool,
            )
        if wanted is not None:
            return wanted
        room = min(context, pool) - prompt
        return room if params.constraint is not None else min(max(DEFAULT_MAX_TOKENS, least), room)

    def versioned(self, namespace: Namespace) -> Namespace:
        """The namespace as the tree knows it: of these weights."""
        return Namespace(self.model_version, namespace.adapter, namespace.salt, namespace.extra_key)

    def submit(self, requests: Sequence[Request]) -> None:
        """Hand requests to the engine together, as soon as their constraints are compiled."""
        hand_in(requests, self.engine, self._constrainer, self.text)

    # -- looking and keeping house

    def stats(self) -> Stats:
        """The engine's counters and sizes, between two steps."""
        return self.engine.call(self.engine.stats)

    def tree(self) -> TreeSnapshot:
        """The radix tree as a value that prints, between two steps."""
        memory = self.engine.scheduler.memory
        return self.engine.call(lambda: memory.cache.snapshot(self.text.decode))

    def check(self) -> None:
        """Raise EngineInvariantError unless the engine's books add up."""
        self.engine.call(self.engine.check)

    def flush_cache(self, namespace: Namespace | None = None) -> int:
        """See `Backend`; what is pinned stays."""
        if namespace is not None:
            check_namespace(namespace)
        wanted = None if namespace is None else self.versioned(namespace)
        return self.engine.call(lambda: self.engine.scheduler.memory.flush(wanted))

    def pin(
        self, prompt: str | Sequence[int], *, ttl: float, namespace: Namespace = Namespace()
    ) -> Pin:
        """Keep a prefix in the cache for `ttl` seconds, whether anybody uses it or not; what is not
        cached yet is computed now.

        Whole pages are pinned. Raises OutOfCacheMemory, with the numbers, if more than
        max_pinned_share of the pool would be. A text's last token may be another one when the text
        goes on; then all but that is shared.
        """
        use = self._use(namespace, "read-write", 0)
        return pin_prefix(self, self._prompt_ids(prompt), ttl=ttl, namespace=use.namespace)

    def reload_weights(self, model: str | Path | None = None) -> None:
        """Take the weights anew, from where they came or from another model of the same shape.

        Branches go on, and what they stand on is computed again: all that was cached or pinned is
        forgotten, and `model_version` is new. The tokenizer and the chat format stay. Raises
        ModelLoadError, and InvalidArgument while requests are under way; then nothing has changed.
        """
        reload_weights(self, model)

    def warmup(self) -> None:
        """Run a short request, so that the first real one does not pay for the first touch of
        everything.
        """
        ids = [0] * min(8, self.config.max_positions - 2)
        self.generate(
            [ids], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True), namespace=_WARMUP
        )
        self.flush_cache(_WARMUP)

    def close(self) -> None:
        self._finalizer()

    def __enter__(self) -> LocalBackend:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


_WARMUP = Namespace(extra_key="stemma-warmup")
