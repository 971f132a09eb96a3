"""`AsyncLLM`: the engine in its own process, asynchronously. It streams and it aborts; the HTTP routes stand on it.

Knows text and token ids; no HTTP. Never imports torch: that is the engine process's.
"""

import asyncio
import itertools
import os
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import msgspec

from trunkline.api.bad_words import bad_word_ids
from trunkline.api.cache_report import Explanation, explain
from trunkline.api.client import EngineClient
from trunkline.api.constrained import Checks
from trunkline.api.dialect import Dialect, Found, Plan, look_at
from trunkline.api.engine_process import EngineProcess
from trunkline.api.generation import Delta, Generation, Observer, OutputProcessor
from trunkline.api.part_cache import LONG_TEXT, PartCache
from trunkline.api.preparing import Preparing
from trunkline.api.prompt_map import ReadPrompt
from trunkline.api.template import ChatTemplate
from trunkline.api.template_source import chat_template_source
from trunkline.api.tools import read_tools
from trunkline.config import EngineConfig, EngineFlags
from trunkline.constraint import Constraint, Grammar
from trunkline.errors import (
    ConfigError,
    ContextLengthExceeded,
    EngineDead,
    InvalidParameter,
    Overloaded,
)
from trunkline.grammar.prepare import Prepared
from trunkline.grammar.prepared_cache import PreparedCache
from trunkline.inputs import (
    CHAT_DEFAULT,
    GENERATE_DEFAULT,
    NOTHING,
    Prompt,
    check_labels,
    check_writes,
    checked_sampling,
    token_ids_of,
)
from trunkline.messages import CacheReport, Generate, Loading, Ready
from trunkline.models.checkpoint import Checkpoint, open_checkpoint
from trunkline.models.hub import local_config
from trunkline.models.tokenizer import Tokenizer, load_tokenizer
from trunkline.outputs import RequestOutput
from trunkline.sampling import SamplingParams


class AsyncLLM:
    """A model served by an engine process of its own.

    async with AsyncLLM() as llm:                                  # the built-in model
        async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(output.outputs[0].delta, end="")

    llm = AsyncLLM("path/to/folder-or.gguf", max_num_seqs=8)       # flags as of `trunkline serve`
    llm = AsyncLLM("HuggingFaceTB/SmolLM2-360M-Instruct")          # on the Hugging Face hub; here it is downloaded, which blocks
    await llm.start()                                              # or at the first request
    await llm.shutdown()

    Leaving the loop early, or cancelling its task, aborts the request within a step; so does `abort(request_id)`.
    Starting raises StartupError: ModelError, ConfigError, or EngineFailedToStart with the engine's own words.
    Everything raises EngineDead once the engine process has ended.

    chat_template  path of a Jinja file, or the template itself; None: the model's own
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        chat_template: str | None = None,
        **flags: Unpack[EngineFlags],
    ) -> None:
        self._configure(local_config(model, **flags), chat_template)

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        *,
        chat_template: str | None = None,
        log_format: str = "text",
        process: EngineProcess | None = None,
    ) -> Self:
        """The same from composed settings.

        log_format  the engine's
        process     an engine that runs with these settings already; from here on it is ours to end
        """
        llm = cls.__new__(cls)
        llm._configure(config, chat_template, log_format)
        llm.process = process
        return llm

    def _configure(self, config: EngineConfig, chat_template: str | None, log_format: str = "text") -> None:
        self.config = config
        self._log_format = log_format
        self.ready: Ready | None = None  # None until the engine takes requests, and after `shutdown`
        self.checkpoint: Checkpoint
        self.tokenizer: Tokenizer
        self.template: ChatTemplate | None = None
        self._dialect: Dialect
        self._longest_token: int
        self._parts: PartCache
        self.process: EngineProcess | None = None
        self.client: EngineClient | None = None
        self._template_source = chat_template_source(chat_template) if chat_template else None
        self._starting = asyncio.Lock()
        self._watcher: asyncio.Task[EngineDead] | None = None
        self._numbers = itertools.count()  # of everything sent to the engine
        self._prepared = PreparedCache()
        self._preparing = Preparing(self._prepared)
        self._generations: dict[str, Generation] = {}

    # ---------------------------------------------------------------- life

    async def start(self, *, on_loading: Callable[[Loading], None] | None = None) -> Self:
        """Start the engine process and wait until it takes requests. Idempotent.

        on_loading  is told how far the weights are read
        """
        async with self._starting:
            if self.ready is None:
                try:
                    await self._start(on_loading)
                except BaseException:
                    await self.shutdown()
                    raise
        return self

    async def _start(self, on_loading: Callable[[Loading], None] | None) -> None:
        self.checkpoint = await asyncio.to_thread(open_checkpoint, self.config.model)
        # Both also by names of our own: `shutdown` may come while we wait.
        process = self.process = self.process or EngineProcess(self.config, log_format=self._log_format)
        client = self.client = EngineClient(process.address, on_loading=on_loading)
        client.start()
        self._watcher = asyncio.create_task(self._watch(process, client), name="engine watcher")
        # While the engine imports and reads weights:
        self.tokenizer, self._longest_token = await asyncio.to_thread(_load_tokenizer, self.config.model.path)
        self._parts = PartCache(self.tokenizer)
        template = self._template_source or self.tokenizer.chat_template
        self.template = ChatTemplate(template, special_tokens=self.tokenizer.special_tokens) if template else None
        self._dialect = Dialect.of(self.template, self.tokenizer)
        try:
            self.ready = await client.wait_ready()
        except EngineDead:
            raise process.start_error() from None

    async def _watch(self, process: EngineProcess, client: EngineClient) -> EngineDead:
        await process.wait()
        dead = EngineDead(f"The engine process ended ({process.describe_exit()}).")
        client.mark_dead(dead)
        return dead

    async def wait_dead(self) -> EngineDead:
        """Return when the engine process has ended by itself, and everything under way has been told."""
        assert self._watcher is not None, "the engine was never started"
        return await asyncio.shield(self._watcher)

    async def shutdown(self) -> None:
        """End the engine; requests under way fail with Overloaded. Idempotent."""
        loading, self.ready = self.ready is None, None
        client, self.client = self.client, None
        process, self.process = self.process, None
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()
        if client is not None:
            client.end(Overloaded("The server is shutting down.", code="shutting_down"))
            await client.close()
        if process is not None:
            await process.stop(loading=loading)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.shutdown()

    # ---------------------------------------------------------------- use

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt: one RequestOutput each time something was added.

        prompt           text, token ids, or {"prompt_token_ids": [...]}
        sampling_params  default: SamplingParams(max_tokens=16)
        request_id       to abort it by; must be unique among those running
        priority         lower is more urgent, under the policy "priority"
        cache_salt       requests with different salts never share cached prefixes

        Raises RequestError if it is refused.
        """
        await self.start()
        text = prompt if isinstance(prompt, str) else None
        token_ids = await self.encode(prompt) if isinstance(prompt, str) else token_ids_of(prompt)
        sampling = GENERATE_DEFAULT if sampling_params is None else checked_sampling(sampling_params)
        async for output in self._stream(text, token_ids, sampling, request_id, priority, cache_salt):
            yield output

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation, as `generate`; the prompt is what the chat template makes of it.

        tools, tool_choice, parallel_tool_calls  OpenAI's: what may and must be called (docs/tools.md). Calls are in the
                                                 outputs' `tool_calls` once a text has ended; the text is what the model wrote
        """
        await self.start()
        if self.template is None:
            raise ConfigError("The model has no chat template; pass one as chat_template.")
        use = read_tools(tools, tool_choice, parallel_tool_calls)
        text = self.template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
        )
        token_ids = await self.encode(text, add_special_tokens=False, what="messages", owner=cache_salt)
        sampling = CHAT_DEFAULT if sampling_params is None else checked_sampling(sampling_params)
        plan = self._dialect.plan(use, response=sampling.constraint, prompt=text)
        sampling = msgspec.structs.replace(sampling, constraint=plan.constraint)
        async for output in self._stream(text, token_ids, sampling, request_id, priority, cache_salt, plan):
            yield output

    async def explain(self, prompt: Prompt, *, cache_salt: str = "") -> Explanation:
        """How much of a prompt is cached now, and why not more: `.sentence` says it in words. Nothing is computed."""
        await self.start()
        token_ids = await self.encode(prompt) if isinstance(prompt, str) else token_ids_of(prompt)
        client, ready = self._running()
        self._check_prompt(token_ids, ready, NOTHING, "prompt")
        read = ReadPrompt(token_ids, self.tokenizer)
        reply = await client.call("explain", tenant="", salt=cache_salt, prompt=read.to_bytes())
        return explain(msgspec.convert(reply, CacheReport), read, page_size=ready.page_size)

    def abort(self, request_id: str) -> None:
        """End a request of `generate` or `chat`: its last output says finish_reason "abort". Unknown ids are
        ignored."""
        if generation := self._generations.get(request_id):
            generation.close()

    async def call(self, method: str, **args: Any) -> Any:
        """Ask the engine: "stats", "check", "flush". Raises api.client.CallFailed."""
        return await self._running()[0].call(method, **args)

    # ---------------------------------------------------------------- what the routes use too

    @property
    def max_tokens_per_request(self) -> int:
        """Tokens that one request may have, prompt and output: the model's limit or the whole cache, whichever is
        smaller."""
        ready = self._running()[1]
        return min(ready.max_model_len, ready.num_pages * ready.page_size)

    async def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        what: str = "prompt",
        may_be_cut: bool = False,
        owner: Hashable = None,
    ) -> list[int]:
        """Token ids. Text that looks like a special token is one, as in Hugging Face's tokenizers.

        may_be_cut  of a text so long that it cannot fit, the beginning is not read: enough is left for all tokens that fit
        owner       whose text it is: what of it the same owner has sent before is not tokenized again. None: nobody's

        Raises InvalidParameter for half a surrogate pair, and ContextLengthExceeded at once for a text so long that it
        cannot fit.
        """
        if may_be_cut:
            text = text[-self.max_tokens_per_request * self._longest_token :]
        self.check_num_characters(len(text), what=what)
        if owner is not None and not add_special_tokens:
            return await self._parts.encode(text, owner=owner)
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    def check_num_characters(self, num_characters: int, *, what: str = "prompt") -> None:
        """Raises ContextLengthExceeded for a text so long that it cannot fit, however it is tokenized."""
        fewest = num_characters // self._longest_token
        if fewest > self.max_tokens_per_request:
            cause = " (That is the fewest it can be: a text this long is refused before it is tokenized.)"
            raise ContextLengthExceeded(limit=self.max_tokens_per_request, seen=fewest, what=what, cause=cause)

    async def prepare(self, constraint: Constraint) -> Prepared:
        """What the engine gets for a constraint, and what to compare the finished text with.

        Raises GrammarRefused, and Overloaded if too many are being prepared.
        """
        return await self._preparing.prepare(constraint.fitting(self.tokenizer.is_special))

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        grammar: Grammar | None = None,
        shown_ids: frozenset[int] = frozenset(),
        request_id: str,
        priority: int = 0,
        tenant: str = "",
        salt: str = "",
        pin_seconds: float = 0.0,
        pin_tokens: int | None = None,
        pooling: str = "",
        what: str = "prompt",
        observer: Observer | None = None,
    ) -> Generation:
        """Send prompts to the engine: `sampling.n` continuations of each, i of them with seed + i.

        grammar      what `prepare` made of `sampling.constraint`; None: it is prepared here
        shown_ids    special tokens whose text is shown all the same
        tenant       whose request: tenants never share cached prefixes
        pin_seconds  keep the prompts in the cache for so long, as far as the tenant's share allows; 0: don't
        pin_tokens   of each prompt, only so many first tokens
        pooling      one of config.POOLINGS: of each prompt only the embedding is wanted, and `sampling` is inputs.NOTHING
        what         the parameter to name in errors: "prompt" or "messages"

        Raises ContextLengthExceeded, InvalidParameter for token ids outside the vocabulary, GrammarRefused, Overloaded,
        EngineDead.
        """
        client, ready = self._running()
        arrival = time.monotonic()
        if grammar is None and sampling.constraint is not None:
            grammar = self._prepared.prepare(sampling.constraint.fitting(self.tokenizer.is_special)).grammar
        sampling.check_vocabulary(ready.vocab_size)
        check_writes(self.checkpoint.config.has_head, sampling)
        bad_words = bad_word_ids(self.tokenizer, sampling.bad_words)
        # Neither text nor what it must follow are the engine's business: it gets a grammar.
        continuations = sampling.continuations(stop=(), constraint=None, bad_words=())
        requests: list[Generate] = []
        choices: dict[str, OutputProcessor] = {}
        for prompt in prompts:
            self._check_prompt(prompt, ready, sampling, what)
            group = f"{request_id}-{next(self._numbers)}" if sampling.n > 1 else ""
            for params in continuations:
                # Numbered: a caller may use an id again while the last messages of its first use are still on their
                # way.
                name = f"{request_id}-{next(self._numbers)}"
                choices[name] = OutputProcessor(
                    self.tokenizer,
                    sampling,
                    eos_token_ids=ready.eos_token_ids,
                    index=len(requests),
                    shown_ids=shown_ids,
                )
                requests.append(
                    Generate(
                        request_id=name,
                        prompt=array("i", prompt).tobytes(),
                        sampling=params,
                        bad_words=bad_words,
                        grammar=grammar,
                        priority=priority,
                        tenant=tenant,
                        salt=salt,
                        group=group,
                        pin_seconds=pin_seconds if len(requests) % sampling.n == 0 else 0.0,  # once for each prompt
                        pin_tokens=pin_tokens,
                        pooling=pooling,
                        arrival=arrival,
                    )
                )
        return Generation(
            client.generate(requests),
            choices,
            prompts=prompts,
            n=sampling.n,
            has_pin=pin_seconds > 0,
            observer=observer,
            sampling=sampling,
        )

    def check_prompt(self, prompt: Sequence[int], sampling: SamplingParams, *, what: str = "prompt") -> None:
        """Raises ContextLengthExceeded, and InvalidParameter for no tokens and for ids outside the vocabulary."""
        self._check_prompt(prompt, self._running()[1], sampling, what)

    def _check_prompt(self, prompt: Sequence[int], ready: Ready, sampling: SamplingParams, what: str) -> None:
        """The engine would refuse it too; but here all of a request's prompts are looked at before any is sent."""
        if not prompt:
            raise InvalidParameter(f"The {what} is empty; it must have at least one token.", param=what)
        for token_id in (min(prompt), max(prompt)):
            if not 0 <= token_id < ready.vocab_size:
                raise InvalidParameter.of(what, token_id, f"token ids from 0 to {ready.vocab_size - 1}")
        num_cache_tokens = ready.num_pages * ready.page_size
        sampling.check_length(
            len(prompt), max_model_len=ready.max_model_len, num_cache_tokens=num_cache_tokens, what=what
        )

    def _running(self) -> tuple[EngineClient, Ready]:
        if self.client is None or self.ready is None:
            raise Overloaded("The model is still loading; try again in a moment.")
        return self.client, self.ready

    # ---------------------------------------------------------------- outputs

    async def _stream(
        self,
        text: str | None,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str | None,
        priority: int,
        salt: str,
        plan: Plan = Plan(),  # noqa: B008 (immutable)
    ) -> AsyncGenerator[RequestOutput, None]:
        name = f"request-{next(self._numbers)}" if request_id is None else request_id
        check_labels(name, priority, salt)
        if name in self._generations:
            raise InvalidParameter.of("request_id", name, "an id that no running request has")
        grammar = checks = None
        if sampling.constraint is not None:
            prepared = await self.prepare(sampling.constraint)
            grammar, checks = prepared.grammar, Checks(sampling.constraint, prepared)
        generation = self.submit(
            [token_ids],
            sampling,
            grammar=grammar,
            shown_ids=plan.shown_ids,
            request_id=name,
            priority=priority,
            salt=salt,
        )
        found = [Found()] * len(generation.choices)
        self._generations[name] = generation
        try:
            async for deltas in generation:
                for delta in deltas:
                    if delta.finish_reason is not None and (checks is not None or plan.use is not None):
                        choice = generation.choices[delta.index]
                        found[delta.index] = await asyncio.to_thread(look_at, choice, plan, checks)
                yield _output(name, text, generation, deltas, found)
            if any(not choice.finished for choice in generation.choices):
                for choice in generation.choices:
                    choice.finish_reason = choice.finish_reason or "abort"
                yield _output(name, text, generation, [], found)
        finally:
            del self._generations[name]
            generation.close()


def _load_tokenizer(path: str) -> tuple[Tokenizer, int]:
    """The tokenizer, and the size in bytes of its longest token."""
    tokenizer = load_tokenizer(path)
    return tokenizer, max(len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size))


def _output(
    request_id: str, prompt: str | None, generation: Generation, deltas: list[Delta], found: list[Found]
) -> RequestOutput:
    """All there is so far, with what the deltas added."""
    added = dict.fromkeys(range(len(generation.choices)), "")
    for delta in deltas:
        added[delta.index] += delta.text
    first = generation.choices[0]
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=tuple(generation.prompts[0]),
        prompt_logprobs=None if first.prompt_logprobs is None else tuple(first.prompt_logprobs),
        cached_tokens=first.cached_tokens,
        outputs=tuple(
            choice.output(added[choice.index], **found[choice.index]._asdict()) for choice in generation.choices
        ),
        finished=all(choice.finished for choice in generation.choices),
    )
