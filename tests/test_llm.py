"""`LLM`: the engine in this process, with the tiny model."""

import json
import math
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.tiny import tiny_gguf, tiny_model
from trunkline import LLM, Constraint, SamplingParams
from trunkline.errors import ConfigError, EngineDead, InvalidParameter, ModelError, RequestError
from trunkline.grammar.interface import GrammarRefused
from trunkline.inputs import Prompt
from trunkline.outputs import RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(str(tiny_model(tmp_path_factory.mktemp("tiny"))), num_pages=128, threads=1) as llm:
        yield llm


def idle(llm: LLM) -> bool:
    """True if no request is left and every page is free or in the tree."""
    llm.engine.scheduler.check()
    stats = llm.engine.stats()
    return not (stats["running"] or stats["waiting"] or stats["pages"]["lease"] or stats["pages"]["copy"])


def test_it_says_what_it_loads(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = str(tiny_model(tmp_path / "tiny"))
    with caplog.at_level("INFO", "trunkline.llm"), LLM(path, num_pages=8, max_model_len=64, threads=1):
        pass
    loading, loaded = (record.message for record in caplog.records if record.name == "trunkline.llm")
    assert loading == f"Loading tiny from {path}."
    assert (
        loaded.startswith("tiny, float16, on cpu (1 thread") and "KV cache 128 tokens, at most 64 a request" in loaded
    )
    assert "KV cache" not in capsys.readouterr().err, "nobody sits at a terminal, and nobody asked for a log"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with LLM(path, num_pages=8, max_model_len=64, threads=1):
        assert "tiny, float16, on cpu (1 thread" in capsys.readouterr().err


def likeliest(output: RequestOutput) -> dict[int, float]:
    """Log-probabilities of the likeliest first tokens, by their ids."""
    scores = output.outputs[0].logprobs
    assert scores is not None
    return {candidate.token_id: candidate.logprob for candidate in scores[0].top}


@pytest.mark.parametrize("quantization", ["gguf", "int8"])
def test_weights_in_fewer_bits_say_what_the_same_weights_in_32_do(tmp_path: Path, quantization: str) -> None:
    """The file's own weights, in the second case as 8 bits a channel of them: close, or the file would be in question."""
    file = str(tiny_gguf(tmp_path / "tiny.gguf", quantization="Q8_0"))
    settings: dict[str, Any] = {"num_pages": 64, "threads": 1}
    prompts = ["hello world", "what is it"]
    with LLM(file, dtype="float32", **settings) as exact, LLM(file, quantization=quantization, **settings) as llm:
        expected = exact.generate(prompts, SamplingParams(temperature=0, max_tokens=1, logprobs=5))
        found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, logprobs=5))
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.outputs[0].text == theirs.outputs[0].text
            mine, other = likeliest(ours), likeliest(theirs)
            tolerance = 0.02 if quantization == "gguf" else 0.3
            assert len(common := mine.keys() & other.keys()) >= 3
            assert all(abs(mine[token] - other[token]) < tolerance for token in common)
        together = llm.generate(prompts, GREEDY)
        assert [o.outputs[0].token_ids for o in together] == [
            llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts
        ], "nobody's text depends on the neighbours"


def test_it_says_how_weights_are_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = str(tiny_gguf(tmp_path / "tiny.gguf", quantization="Q4_1"))
    with caplog.at_level("INFO", "trunkline.llm"), LLM(file, num_pages=8, max_model_len=64, threads=1):
        pass
    assert "tiny, Q4_1 kept packed, on cpu (1 thread" in caplog.text
    with pytest.raises(ConfigError, match="--quantization is 'gguf', but no matrix"):
        LLM(str(tiny_model(tmp_path / "tiny")), quantization="gguf")
    with pytest.raises(ConfigError, match="--quantization is 'aqlm'; allowed is one of auto, none, gguf, awq"):
        LLM(file, quantization="aqlm")


def test_one_prompt_or_many_as_text_or_token_ids(llm: LLM) -> None:
    texts = ["hello world", "what is it", "hello there"]
    ids = [llm.tokenizer.encode(text) for text in texts]
    many = llm.generate(texts, GREEDY)
    assert [output.prompt for output in many] == texts
    assert [list(output.prompt_token_ids) for output in many] == ids
    assert [len(output.outputs[0].token_ids) for output in many] == [12] * 3
    assert [llm.generate(text, GREEDY)[0].text for text in texts] == [output.text for output in many]
    assert [output.text for output in llm.generate(ids, GREEDY)] == [output.text for output in many]
    tokenized: list[Prompt] = [{"prompt_token_ids": token_ids} for token_ids in ids]
    assert [output.text for output in llm.generate(tokenized, GREEDY)] == [output.text for output in many]
    assert llm.generate(tokenized[0], GREEDY)[0].text == many[0].text
    assert llm.generate(ids[0], GREEDY)[0].text == many[0].text
    assert llm.generate([], GREEDY) == []
    assert idle(llm)


def test_text_is_what_the_tokens_say(llm: LLM) -> None:
    (output,) = llm.generate("hello world", GREEDY)
    assert output.finished and output.outputs[0].finish_reason == "length"
    assert output.text == llm.tokenizer.decode(output.outputs[0].token_ids)


def test_a_second_call_finds_the_first_in_the_cache(llm: LLM) -> None:
    prompt = "the quick brown fox jumps over the lazy dog " * 3
    (cold,), (warm,) = llm.generate(prompt, GREEDY), llm.generate(prompt, GREEDY)
    assert warm.cached_tokens == (len(warm.prompt_token_ids) - 1) // 16 * 16 > 0
    assert warm.text == cold.text


def test_chat_goes_through_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hello"}]
    (output,) = llm.chat(conversation, GREEDY)
    assert output.prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert [answer.text for answer in llm.chat([conversation, conversation], GREEDY)] == [output.text] * 2


def test_n_continuations_have_seeds_of_their_own(llm: LLM) -> None:
    sampling = SamplingParams(n=3, seed=5, temperature=1, max_tokens=10, ignore_eos=True)
    (first,), (again,) = llm.generate("hello", sampling), llm.generate("hello", sampling)
    assert [output.index for output in first.outputs] == [0, 1, 2]
    assert len({output.text for output in first.outputs}) == 3
    assert [output.text for output in first.outputs] == [output.text for output in again.outputs]
    alone = SamplingParams(seed=6, temperature=1, max_tokens=10, ignore_eos=True)
    assert llm.generate("hello", alone)[0].text == first.outputs[1].text


def test_n_continuations_read_their_prompt_once(llm: LLM) -> None:
    before = llm.engine.stats()["prompt_tokens_computed_total"]
    (output,) = llm.generate("one two three one two four", SamplingParams(n=4, seed=5, max_tokens=6, ignore_eos=True))
    num_prompt = len(output.prompt_token_ids)
    assert num_prompt % 16 and output.cached_tokens == 0
    assert llm.engine.stats()["prompt_tokens_computed_total"] - before == num_prompt


def test_seeds_count_around_the_largest(llm: LLM) -> None:
    sampling = SamplingParams(n=2, seed=2**64 - 1, max_tokens=12, ignore_eos=True)
    last, first = llm.generate("hello", sampling)[0].outputs
    alone = llm.generate("hello", SamplingParams(seed=0, max_tokens=12, ignore_eos=True))[0]
    assert alone.text == first.text != last.text


def test_a_stop_string_ends_its_request_and_leaves_nothing(llm: LLM) -> None:
    (whole,) = llm.generate("hello world", GREEDY)
    stop = next(text for text in whole.text if text.isprintable())
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=(stop,))
    (cut,) = llm.generate("hello world", sampling)
    assert cut.text == whole.text.split(stop)[0]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    assert idle(llm)


def test_sampling_may_differ_by_prompt(llm: LLM) -> None:
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    outputs = llm.generate(["hello", "hello"], [short, GREEDY])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 12]
    with pytest.raises(InvalidParameter, match="one for each of the 2 prompts"):
        llm.generate(["hello", "hello"], [GREEDY])


def test_logprobs_of_prompt_and_output(llm: LLM) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (output,) = llm.generate("hello world", sampling)
    scores = output.outputs[0].logprobs
    assert scores is not None and output.prompt_logprobs is not None
    assert [score.chosen.token_id for score in scores] == list(output.outputs[0].token_ids)
    assert all(score.rank == 1 and score.top[0] == score.chosen for score in scores), "greedy takes the likeliest"
    assert all(len(score.top) == 2 and math.exp(score.top[0].logprob) <= 1 for score in scores)
    assert [score.chosen.token_id for score in output.prompt_logprobs] == list(output.prompt_token_ids[1:])


@pytest.mark.parametrize(
    ("prompt", "code", "words"),
    [
        ([5] * 600, "context_length_exceeded", "resulted in 600 tokens"),
        ([10**6], None, "'prompt' is 1000000"),
        ([-1], None, "'prompt' is"),
        ([], None, "The prompt is empty"),
    ],
)
def test_a_refused_prompt_leaves_nothing_of_its_batch(
    llm: LLM, prompt: list[int], code: str | None, words: str
) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        llm.generate([[1, 2, 3], prompt], GREEDY)
    assert refused.value.code == code
    assert idle(llm)
    assert len(llm.generate("hello", GREEDY)[0].outputs[0].token_ids) == 12


def test_gguf_and_folder_give_the_same_text(llm: LLM, tmp_path: Path) -> None:
    texts = []
    for path in (tiny_gguf(tmp_path / "tiny.gguf"), tiny_model(tmp_path / "tiny")):
        with LLM(str(path), dtype="float32", num_pages=64, threads=1) as other:
            texts.append(other.generate("hello world", GREEDY)[0].text)
    assert texts[0] == texts[1] != ""


@pytest.mark.parametrize(
    "schedule", [{"max_num_batched_tokens": 5, "max_num_seqs": 5}, {"enable_prefix_caching": False}]
)
def test_same_text_whatever_the_schedule(llm: LLM, tmp_path: Path, schedule: dict[str, int]) -> None:
    prompts = [f"hello {'world ' * (i % 5)}{i}" for i in range(12)]
    expected = [output.text for output in llm.generate(prompts, GREEDY)]
    with LLM(str(tiny_model(tmp_path / "tiny")), num_pages=64, threads=2, **schedule) as other:  # type: ignore[arg-type]
        assert [output.text for output in other.generate(prompts, GREEDY)] == expected


def test_ctrl_c_ends_the_call_and_not_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate("hello world", GREEDY)[0].text
    step = llm.engine.step
    num_steps = 0

    def interrupted() -> Any:
        nonlocal num_steps
        num_steps += 1
        signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["hello world", "hello there"], GREEDY)
    assert num_steps == 1, "the step under way is finished, and no other is begun"
    assert idle(llm)
    monkeypatch.undo()
    assert llm.generate("hello world", GREEDY)[0].text == expected


def test_an_error_in_a_step_ends_the_call_and_not_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate("hello world", GREEDY)[0].text

    def forward(*_: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(llm.engine.worker._runner, "forward", forward)  # type: ignore[attr-defined]
    with pytest.raises(MemoryError):
        llm.generate(["hello world", "hello there"], GREEDY)
    monkeypatch.undo()
    assert idle(llm)
    assert llm.generate("hello world", GREEDY)[0].text == expected


def test_calls_from_several_threads_take_turns(llm: LLM) -> None:
    expected = llm.generate("hello world", GREEDY)[0].text
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda: texts.append(llm.generate("hello world", GREEDY)[0].text)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [expected] * 4
    assert idle(llm)


@pytest.mark.parametrize(
    "call",
    [
        (None,),
        (b"hello",),
        ([1.5],),
        (["hello", 1],),
        (["hello"], {"temperature": 0}),
        (["hello"], [{"temperature": 0}]),
        (["hello"], []),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(llm: LLM, call: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidParameter, match="allowed is"):
        llm.generate(*call)
    assert idle(llm)


def test_after_close_there_is_a_sentence(tmp_path: Path) -> None:
    llm = LLM(tiny_model(tmp_path / "tiny"), num_pages=64, threads=1)
    llm.close()
    llm.close()
    for _ in range(2):
        with pytest.raises(EngineDead, match="has been closed"):
            llm.generate("hello", GREEDY)


def test_bad_settings_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no-such-folder"):
        LLM("no-such-folder")
    with pytest.raises(ConfigError, match="Did you mean 'max_num_seqs'"):
        LLM("model", max_num_seq=3)  # type: ignore[call-arg]
    for model in ("", 5, b"model", "a\0b"):
        with pytest.raises(ConfigError, match="The model is"):
            LLM(model)  # type: ignore[arg-type]


class Size(BaseModel):
    kind: Literal["cm", "inch"]
    round: bool


SIZE: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["cm", "inch"]}, "round": {"type": "boolean"}},
    "required": ["kind", "round"],
    "additionalProperties": False,
}


def following(constraint: Constraint, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"constraint": constraint, "max_tokens": 64, "temperature": 1, "seed": 2, **fields})


def test_texts_follow_what_they_must(llm: LLM) -> None:
    sampling = [
        following(Constraint(regex="[ab]{4}")),
        following(Constraint(choice=("yes", "no"))),
        following(Constraint(json_schema=SIZE)),
        following(Constraint(json_schema=Size)),
        following(Constraint(ebnf='root ::= "x" | "y"')),
        following(Constraint(lark="start: /[0-9]{2}/")),
        GREEDY,
    ]
    texts = [output.text for output in llm.generate(["hello"] * len(sampling), sampling)]
    assert re.fullmatch("[ab]{4}", texts[0])
    assert texts[1] in ("yes", "no")
    assert json.loads(texts[2]).keys() == json.loads(texts[3]).keys() == {"kind", "round"}
    assert texts[4] in ("x", "y")
    assert re.fullmatch("[0-9]{2}", texts[5])
    assert texts[6] == llm.generate("hello", GREEDY)[0].text, "who follows nothing is not disturbed"
    assert idle(llm)


def test_every_continuation_follows_it_and_is_checked(llm: LLM) -> None:
    (output,) = llm.generate("hello", following(Constraint(json_schema=SIZE), n=4, logprobs=1))
    assert [one.valid for one in output.outputs] == [True] * 4
    assert {json.loads(one.text)["kind"] for one in output.outputs} <= {"cm", "inch"}
    assert [len(one.logprobs or ()) for one in output.outputs] == [len(one.token_ids) for one in output.outputs]


def test_of_what_was_cut_nothing_is_claimed(llm: LLM) -> None:
    (output,) = llm.generate("hello", following(Constraint(json_schema=SIZE), max_tokens=2))
    assert (output.outputs[0].finish_reason, output.outputs[0].valid) == ("length", None)
    (output,) = llm.generate("hello", GREEDY)
    assert output.outputs[0].valid is None


def test_what_cannot_be_enforced_is_refused_or_checked(llm: LLM) -> None:
    schema = {"type": "string", "pattern": r"^(a|b)\1$", "maxLength": 0}
    with pytest.raises(GrammarRefused, match="'pattern' is not permitted"):
        llm.generate("hello", following(Constraint(json_schema=schema)))
    assert idle(llm)
    (output,) = llm.generate("hello", following(Constraint(json_schema=schema, unsupported="validate")))
    assert (output.text, output.outputs[0].valid) == ('""', False)


def test_what_does_not_compile_fails_in_words(llm: LLM) -> None:
    with pytest.raises(RequestError, match="constraint"):
        llm.generate("hello", following(Constraint(lark="start: missing")))
    assert idle(llm)
