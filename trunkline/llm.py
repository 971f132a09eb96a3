"""`LLM`: the engine in the caller's own process, for batches of prompts. Synchronous; `AsyncLLM` streams."""

import logging
import os
import sys
import threading
from array import array
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, Unpack

import msgspec
from tqdm import tqdm

from trunkline.api.bad_words import bad_word_ids
from trunkline.api.cache_report import Explanation, explain
from trunkline.api.constrained import Checks
from trunkline.api.dialect import Dialect, Plan, look_at
from trunkline.api.embedding_plan import EmbeddingPlan
from trunkline.api.generation import OutputProcessor
from trunkline.api.prompt_map import ReadPrompt
from trunkline.api.template import ChatTemplate
from trunkline.api.template_source import chat_template_source
from trunkline.api.tools import read_tools
from trunkline.config import EngineFlags
from trunkline.errors import ConfigError, EngineDead, InvalidParameter
from trunkline.grammar.prepared_cache import PreparedCache
from trunkline.grammar.service import CompileService
from trunkline.grammar.vocabulary import Vocabulary
from trunkline.inputs import (
    CHAT_DEFAULT,
    GENERATE_DEFAULT,
    NOTHING,
    Prompt,
    as_batch,
    check_writes,
    checked_sampling,
    token_ids_of,
)
from trunkline.interrupts import interrupts_held
from trunkline.messages import CacheReport, Call, Failed, Finished, FromEngine, Generate, Reply, Tokens
from trunkline.models.checkpoint import open_checkpoint
from trunkline.models.hub import local_config
from trunkline.models.tokenizer import Tokenizer, load_tokenizer
from trunkline.outputs import CompletionOutput, EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from trunkline.sampling import SamplingParams
from trunkline.scheduler.engine import Engine

logger = logging.getLogger("trunkline.llm")

Message = Mapping[str, Any]


class LLM:
    """A model, its cache and its scheduler, here.

    llm = LLM()                                              # the built-in model
    llm = LLM("path/to/folder-or.gguf", dtype="float32")
    llm = LLM("HuggingFaceTB/SmolLM2-360M-Instruct")         # on the Hugging Face hub; downloaded the first time
    llm.generate(["Once upon a time"], SamplingParams(max_tokens=32))[0].text
    llm.generate([[1, 17, 9]])                               # token ids
    llm.chat([{"role": "user", "content": "Hello"}])[0].text
    llm.embed(["Hello"])[0].outputs.embedding

    What one call has read, the next finds in the cache. Flags are those of `trunkline serve` (config.EngineFlags).
    Calls from several threads wait for one another. Ctrl-C ends a call between two steps; the next call works as ever.
    Raises ModelError or ConfigError if the model cannot be served with these settings.

    chat_template  path of a Jinja file, or the template itself; None: the model's own
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        chat_template: str | None = None,
        **flags: Unpack[EngineFlags],
    ) -> None:
        from trunkline.workers.worker import load_worker  # imports torch

        config = local_config(model, **flags)
        checkpoint = open_checkpoint(config.model)
        self.tokenizer: Tokenizer = load_tokenizer(config.model.path)
        template = chat_template_source(chat_template) if chat_template else self.tokenizer.chat_template
        self._template = ChatTemplate(template, special_tokens=self.tokenizer.special_tokens) if template else None
        self._dialect = Dialect.of(self._template, self.tokenizer)
        logger.info("Loading %s from %s.", checkpoint.name, checkpoint.path)
        with tqdm(desc=f"Loading {checkpoint.name}", unit="tensor", leave=False, disable=None) as bar:
            worker = load_worker(config, lambda done, total: _show(bar, done, total), tokenizer=self.tokenizer)
        _tell(
            f"{checkpoint.name}, {worker.dtype}, on {worker.device}; KV cache {worker.num_pages * worker.page_size:,} tokens,"
            f" at most {worker.max_model_len:,} a request"
        )
        self._eos_token_ids = worker.eos_token_ids
        self._pooling, self._hidden_size = checkpoint.pooling, checkpoint.config.hidden_size
        self._has_head = checkpoint.config.has_head
        self._prepared = PreparedCache()
        self.engine = Engine(
            config,
            worker,
            eos_token_ids=worker.eos_token_ids,
            max_model_len=worker.max_model_len,
            vocab_size=worker.vocab_size,
            grammars=CompileService(
                lambda: Vocabulary(self.tokenizer, worker.vocab_size, worker.eos_token_ids), config.grammar
            ),
        )
        self._num_requests = 0
        self._closed = False
        self._lock = threading.Lock()  # held by the call that steps the engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt (text, token ids, or {"prompt_token_ids": [...]}); one output per prompt, in order.

        sampling_params   one for all, or one per prompt; default: SamplingParams(max_tokens=16)
        use_tqdm          a progress bar on a terminal

        Raises RequestError for the first request that is refused; nothing of the batch keeps running then. Raises
        EngineDead after `close`.
        """
        batch = as_batch(prompts)
        sampling = _one_each(GENERATE_DEFAULT if sampling_params is None else sampling_params, len(batch))
        return self._run([self._encode(prompt) for prompt in batch], sampling, use_tqdm).outputs()

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt, in order: `.outputs.embedding`.

        pooling     "mean" of the hidden states behind the model's last norm, or that of the "last" token; None: what the
                    checkpoint says, else "last"
        normalize   of unit length; None: what the checkpoint says, else True
        dimensions  only so many first numbers, where the model was trained for it

        Raises RequestError for what the checkpoint was not made for, and for the first prompt that is refused; EngineDead after
        `close`.
        """
        plan = EmbeddingPlan.of(
            self._pooling, self._hidden_size, pooling=pooling, normalize=normalize, dimensions=dimensions
        )
        encoded = [self._encode(prompt) for prompt in as_batch(prompts)]
        batch = self._run(encoded, [NOTHING] * len(encoded), use_tqdm, pooling=plan.pooling)
        return batch.embeddings(plan)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several; the prompt is what the model's chat template makes of it.

        tools, tool_choice, parallel_tool_calls  OpenAI's: what may and must be called (docs/tools.md). Calls are in the
                                                 outputs' `tool_calls`; the text is what the model wrote
        """
        if self._template is None:
            raise ConfigError("The model has no chat template; pass one as chat_template.")
        use = read_tools(tools, tool_choice, parallel_tool_calls)
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        texts = [
            self._template.render(
                conversation,
                add_generation_prompt=add_generation_prompt,
                chat_template_kwargs=chat_template_kwargs,
                tools=tools,
            )
            for conversation in conversations
        ]
        sampling = _one_each(CHAT_DEFAULT if sampling_params is None else sampling_params, len(texts))
        plans = [
            self._dialect.plan(use, response=params.constraint, prompt=text)
            for text, params in zip(texts, sampling, strict=True)
        ]
        sampling = [
            msgspec.structs.replace(params, constraint=plan.constraint)
            for params, plan in zip(sampling, plans, strict=True)
        ]
        encoded = [
            _Encoded(text, self.tokenizer.encode(text, add_special_tokens=False), plan)
            for text, plan in zip(texts, plans, strict=True)
        ]
        return self._run(encoded, sampling, use_tqdm).outputs()

    def explain(self, prompt: Prompt) -> Explanation:
        """How much of a prompt is cached now, and why not more: `.sentence` says it in words. Nothing is computed."""
        read = ReadPrompt(self._encode(prompt).token_ids, self.tokenizer)
        with self._lock:
            if self._closed:
                raise EngineDead("This LLM has been closed; make a new one.")
            call = Call(call_id=0, method="explain", args={"tenant": "", "salt": "", "prompt": read.to_bytes()})
            (reply,) = self.engine.handle(call)
        assert isinstance(reply, Reply) and reply.error is None, reply
        return explain(msgspec.convert(reply.result, CacheReport), read, page_size=self.engine.worker.page_size)

    def close(self) -> None:
        """Free the model and the cache. Idempotent."""
        self._closed = True
        with self._lock:
            self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> "_Encoded":
        if isinstance(prompt, str):
            return _Encoded(prompt, self.tokenizer.encode(prompt))
        return _Encoded(None, token_ids_of(prompt))

    def _run(
        self, prompts: list["_Encoded"], sampling: list[SamplingParams], use_tqdm: bool, pooling: str = ""
    ) -> "_Batch":
        """Send everything, and step until idle."""
        with self._lock, interrupts_held() as let_interrupt:
            if self._closed:
                raise EngineDead("This LLM has been closed; make a new one.")
            batch = _Batch(self)
            try:
                for prompt, params in zip(prompts, sampling, strict=True):
                    batch.add(prompt, params, pooling)
                with tqdm(
                    total=len(batch.processors),
                    desc="Embedding" if pooling else "Generating",
                    unit="seq",
                    disable=None if use_tqdm else True,
                ) as bar:
                    while self.engine.has_work:
                        bar.update(batch.take(self.engine.step()))
                        let_interrupt()
            finally:
                batch.abort()
        return batch


class _Encoded(NamedTuple):
    """A prompt as the model reads it."""

    text: str | None  # None: it was given as token ids
    token_ids: list[int]
    plan: Plan = Plan()  # who reads what comes of it


class _Sent(NamedTuple):
    """A prompt under way, and the engine's ids of its continuations."""

    request_id: str
    prompt: _Encoded
    names: list[str]


class _Batch:
    """The requests of one call: n continuations for each prompt."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.processors: dict[str, OutputProcessor] = {}  # by the engine's id
        self.checks: dict[str, Checks] = {}  # the same, of those that have any
        self.plans: dict[str, Plan] = {}
        self.sent: list[_Sent] = []

    def add(self, prompt: _Encoded, sampling: SamplingParams, pooling: str) -> None:
        request_id = f"{self.llm._num_requests}"
        self.llm._num_requests += 1
        names = [f"{request_id}-{index}" for index in range(sampling.n)]
        self.sent.append(_Sent(request_id, prompt, names))
        try:
            token_ids = array("i", prompt.token_ids).tobytes()
        except OverflowError:
            raise InvalidParameter.of(
                "prompt", prompt.token_ids, f"token ids from 0 to {self.llm.engine.vocab_size - 1}"
            ) from None
        constraint = sampling.constraint and sampling.constraint.fitting(self.llm.tokenizer.is_special)
        prepared = self.llm._prepared.prepare(constraint) if constraint is not None else None
        if constraint is not None and prepared is not None:
            self.checks |= dict.fromkeys(names, Checks(constraint, prepared))
        check_writes(self.llm._has_head, sampling)
        bad_words = bad_word_ids(self.llm.tokenizer, sampling.bad_words)
        self.plans |= dict.fromkeys(names, prompt.plan)
        for index, (name, params) in enumerate(zip(names, sampling.continuations(), strict=True)):
            self.processors[name] = OutputProcessor(
                self.llm.tokenizer,
                params,
                eos_token_ids=self.llm._eos_token_ids,
                index=index,
                shown_ids=prompt.plan.shown_ids,
            )
            group = request_id if sampling.n > 1 else ""
            message = Generate(
                request_id=name,
                prompt=token_ids,
                sampling=msgspec.structs.replace(params, constraint=None, bad_words=()),
                bad_words=bad_words,
                grammar=prepared.grammar if prepared is not None else None,
                group=group,
                pooling=pooling,
            )
            self.take(self.llm.engine.handle(message))

    def take(self, messages: Iterable[FromEngine]) -> int:
        """Hand each message to its continuation; returns how many of them ended. Raises RequestError for a Failed
        one."""
        num_ended = 0
        for message in messages:
            assert isinstance(message, Tokens | Finished | Failed)
            processor = self.processors[message.request_id]
            was_finished = processor.finished
            processor.push(message)
            if processor.finished and not was_finished:
                num_ended += 1
                self.llm.engine.scheduler.abort(message.request_id)  # at a stop string, which the engine cannot see
        return num_ended

    def abort(self) -> None:
        """Leave nothing behind in the engine, however the call ended."""
        for name in self.processors:
            self.llm.engine.scheduler.abort(name)

    def embeddings(self, plan: EmbeddingPlan) -> list[EmbeddingRequestOutput]:
        return [
            EmbeddingRequestOutput(
                request_id=request_id,
                prompt=prompt.text,
                prompt_token_ids=tuple(prompt.token_ids),
                cached_tokens=self.processors[name].cached_tokens,
                outputs=EmbeddingOutput(embedding=plan.finish(self.processors[name].embedding).tolist()),
            )
            for request_id, prompt, (name,) in self.sent
        ]

    def outputs(self) -> list[RequestOutput]:
        outputs = []
        for request_id, prompt, names in self.sent:
            processors = [self.processors[name] for name in names]
            scores = processors[0].prompt_logprobs
            outputs.append(
                RequestOutput(
                    request_id=request_id,
                    prompt=prompt.text,
                    prompt_token_ids=tuple(prompt.token_ids),
                    prompt_logprobs=tuple(scores) if scores is not None else None,
                    cached_tokens=processors[0].cached_tokens,
                    outputs=tuple(self._output(name) for name in names),
                    finished=True,
                )
            )
        return outputs

    def _output(self, name: str) -> CompletionOutput:
        processor, checks, plan = self.processors[name], self.checks.get(name), self.plans[name]
        found = look_at(processor, plan, checks)
        return processor.output(**found._asdict())


def _one_each(sampling: SamplingParams | Sequence[SamplingParams], num: int) -> list[SamplingParams]:
    if not isinstance(sampling, list | tuple):
        return [checked_sampling(sampling)] * num
    if len(sampling) != num:
        raise InvalidParameter.of(
            "sampling_params", f"{len(sampling)} of them", f"one, or one for each of the {num} prompts"
        )
    return [checked_sampling(params) for params in sampling]


def _tell(sentence: str) -> None:
    """To the log, and to somebody who sits at a terminal and has set up none."""
    logger.info("%s", sentence)
    if sys.stderr.isatty() and not logger.isEnabledFor(logging.INFO):
        print(sentence, file=sys.stderr)


def _show(bar: "tqdm[Any]", done: int, total: int) -> None:
    bar.total = total
    bar.update(done - bar.n)
