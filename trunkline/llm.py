"""`LLM`: the engine in the caller's own process, for batches of prompts. Synchronous; `AsyncLLM` streams."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import msgspec
import numpy as np
from tqdm import tqdm

from trunkline.api.generation import OutputProcessor
from trunkline.api.template import ChatTemplate
from trunkline.api.template_source import chat_template_source
from trunkline.config import EngineFlags, engine_config
from trunkline.errors import ConfigError, InvalidParameter
from trunkline.messages import Failed, Finished, FromEngine, Generate, Tokens
from trunkline.models.checkpoint import builtin_model, open_checkpoint
from trunkline.models.tokenizer import Tokenizer, load_tokenizer
from trunkline.outputs import RequestOutput
from trunkline.sampling import SamplingParams
from trunkline.scheduler.engine import Engine

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A model, its cache and its scheduler, here.

    llm = LLM()                                              # the built-in model
    llm = LLM("path/to/folder-or.gguf", dtype="float32")
    llm.generate(["Once upon a time"], SamplingParams(max_tokens=32))[0].text
    llm.generate([[1, 17, 9]])                               # token ids
    llm.chat([{"role": "user", "content": "Hello"}])[0].text

    What one call has read, the next finds in the cache. Flags are those of `trunkline serve` (config.EngineFlags).
    Raises ModelError or ConfigError if the model cannot be served with these settings.

    chat_template  path of a Jinja file, or the template itself; None: the model's own
    """

    def __init__(
        self, model: str | None = None, *, chat_template: str | None = None, **flags: Unpack[EngineFlags]
    ) -> None:
        from trunkline.workers.worker import load_worker  # imports torch

        config = engine_config(model or builtin_model(), **flags)
        checkpoint = open_checkpoint(config.model)
        self.tokenizer: Tokenizer = load_tokenizer(config.model.path)
        template = chat_template_source(chat_template) if chat_template else self.tokenizer.chat_template
        self._template = ChatTemplate(template, special_tokens=self.tokenizer.special_tokens) if template else None
        with tqdm(desc=f"Loading {checkpoint.name}", unit="tensor", leave=False, disable=None) as bar:
            worker = load_worker(config, lambda done, total: _show(bar, done, total))
        self._eos_token_ids = worker.eos_token_ids
        self.engine = Engine(
            config,
            worker,
            eos_token_ids=worker.eos_token_ids,
            max_model_len=worker.max_model_len,
            vocab_size=worker.vocab_size,
        )
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt (text, or token ids); one output per prompt, in order.

        sampling_params   one for all, or one per prompt; default: SamplingParams(max_tokens=16)
        use_tqdm          a progress bar on a terminal

        Raises RequestError for the first request that is refused; nothing of the batch keeps running then.
        """
        one_prompt = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer))
        batch: list[Any] = [prompts] if one_prompt else list(prompts)
        sampling = _one_each(sampling_params or SamplingParams(max_tokens=16), len(batch))
        return self._run([self._encode(prompt) for prompt in batch], sampling, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several; the prompt is what the model's chat template makes of it."""
        if self._template is None:
            raise ConfigError("The model has no chat template; pass one as chat_template.")
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        texts = [
            self._template.render(
                conversation, add_generation_prompt=add_generation_prompt, chat_template_kwargs=chat_template_kwargs
            )
            for conversation in conversations
        ]
        sampling = _one_each(sampling_params or SamplingParams(max_tokens=256), len(texts))
        encoded: list[tuple[str | None, list[int]]] = [
            (text, self.tokenizer.encode(text, add_special_tokens=False)) for text in texts
        ]
        return self._run(encoded, sampling, use_tqdm)

    def close(self) -> None:
        """Free the model and the cache. Idempotent."""
        self.engine.worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        return None, [int(token_id) for token_id in prompt]

    def _run(
        self, prompts: list[tuple[str | None, list[int]]], sampling: list[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        """Send everything, step until idle, and put the texts together."""
        batch = _Batch(self)
        try:
            for (text, token_ids), params in zip(prompts, sampling, strict=True):
                batch.add(text, token_ids, params)
            with tqdm(
                total=len(batch.processors), desc="Generating", unit="seq", disable=None if use_tqdm else True
            ) as bar:
                while self.engine.has_work:
                    bar.update(batch.take(self.engine.step()))
        finally:
            batch.abort()
        return batch.outputs()


class _Batch:
    """The requests of one call: n continuations for each prompt."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.processors: dict[str, OutputProcessor] = {}
        self.prompts: list[
            tuple[str, str | None, list[int], list[str]]
        ] = []  # request id, text, token ids, continuation ids

    def add(self, text: str | None, token_ids: list[int], sampling: SamplingParams) -> None:
        request_id = f"{self.llm._num_requests}"
        self.llm._num_requests += 1
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
        names = [f"{request_id}-{index}" for index in range(sampling.n)]
        self.prompts.append((request_id, text, token_ids, names))
        if any(not 0 <= token_id < 2**31 for token_id in token_ids):
            raise InvalidParameter.of("prompt", token_ids, "token ids of the model's vocabulary")
        for index, name in enumerate(names):
            params = msgspec.structs.replace(sampling, n=1, seed=seed + index)
            self.processors[name] = OutputProcessor(
                self.llm.tokenizer, params, eos_token_ids=self.llm._eos_token_ids, index=index
            )
            prompt = np.array(token_ids, "<i4").tobytes()
            self.take(self.llm.engine.handle(Generate(request_id=name, prompt=prompt, sampling=params)))

    def take(self, messages: Iterable[FromEngine]) -> int:
        """Hand each message to its continuation; returns how many of them ended. Raises RequestError for a Failed one."""
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

    def outputs(self) -> list[RequestOutput]:
        outputs = []
        for request_id, text, token_ids, names in self.prompts:
            processors = [self.processors[name] for name in names]
            scores = processors[0].prompt_logprobs
            outputs.append(
                RequestOutput(
                    request_id=request_id,
                    prompt=text,
                    prompt_token_ids=tuple(token_ids),
                    prompt_logprobs=tuple(scores) if scores is not None else None,
                    cached_tokens=processors[0].cached_tokens,
                    outputs=tuple(processor.output() for processor in processors),
                    finished=True,
                )
            )
        return outputs


def _one_each(sampling: SamplingParams | Sequence[SamplingParams], num: int) -> list[SamplingParams]:
    if isinstance(sampling, SamplingParams):
        return [sampling] * num
    if len(sampling) != num:
        raise InvalidParameter.of(
            "sampling_params", f"{len(sampling)} of them", f"one, or one for each of the {num} prompts"
        )
    return list(sampling)


def _show(bar: "tqdm[Any]", done: int, total: int) -> None:
    bar.total = total
    bar.update(done - bar.n)
