"""OutputProcessor: the engine's token ids become text, with nothing lost and nothing leaked."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import EOS, IM_END, TOKEN_IDS
from trunkline.api.generation import Delta, OutputProcessor
from trunkline.errors import RequestError
from trunkline.messages import CacheReport, Failed, Finished, TokenLogprobs, Tokens
from trunkline.models.tokenizer import Tokenizer
from trunkline.sampling import SamplingParams

EOS_IDS = (TOKEN_IDS[EOS], TOKEN_IDS[IM_END])


def tokens(*ids: int, **fields: Any) -> Tokens:
    return Tokens(request_id="r", token_ids=list(ids), **fields)


def finished(reason: str = "length", stop_token_id: int | None = None) -> Finished:
    return Finished(
        request_id="r",
        reason=reason,
        stop_token_id=stop_token_id,
        prompt_tokens=1,
        cached_tokens=0,
        completion_tokens=1,
    )


def processor(tokenizer: Tokenizer, **sampling: Any) -> OutputProcessor:
    return OutputProcessor(tokenizer, SamplingParams(**sampling), eos_token_ids=EOS_IDS, index=2)


def scores(token_id: int, logprob: float = -1.0) -> TokenLogprobs:
    return TokenLogprobs([token_id, token_id], [logprob, logprob], 1)


def test_text_and_end(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer)
    assert output.push(tokens(*b"ab")) == Delta(index=2, text="ab", token_ids=list(b"ab"))
    assert output.push(tokens(EOS_IDS[0])) is None
    end = output.push(finished("stop", EOS_IDS[0]))
    assert end == Delta(index=2, text="", token_ids=[EOS_IDS[0]], finish_reason="stop")
    assert output.push(tokens(*b"late")) is None
    assert (output.text, output.token_ids, output.finished) == ("ab", [*b"ab", EOS_IDS[0]], True)


def test_split_character_waits_for_its_rest(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer)
    first, *rest = "é!".encode()
    assert output.push(tokens(first)) is None
    delta = output.push(tokens(*rest))
    assert delta == Delta(index=2, text="é!", token_ids=[first, *rest])


def test_character_that_is_cut_off_is_replaced(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer)
    output.push(tokens("é".encode()[0]))
    end = output.push(finished())
    assert end is not None
    assert end.text == "\N{REPLACEMENT CHARACTER}"


def test_stop_string_ends_at_its_last_token(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer, stop=("END",), logprobs=1)
    assert output.push(tokens(*b"xE", logprobs=[scores(token_id) for token_id in b"xE"])) is not None
    delta = output.push(tokens(*b"NDyz", logprobs=[scores(token_id) for token_id in b"NDyz"]))
    assert delta is not None
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("", "stop", "END")
    assert output.token_ids == list(b"xEND"), "what came with it is not counted"
    assert output.logprobs is not None
    assert len(output.logprobs) == 4


def test_stop_string_that_was_none_is_given_out_at_the_end(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer, stop=("END",))
    first = output.push(tokens(*b"xEN"))
    assert first is not None
    assert first.text == "x"
    end = output.push(finished())
    assert end is not None
    assert (end.text, end.finish_reason, output.text) == ("EN", "length", "xEN")


@pytest.mark.parametrize("included", [False, True])
def test_stop_token(tokenizer: Tokenizer, included: bool) -> None:
    output = processor(tokenizer, stop_token_ids=(ord("b"),), include_stop_str_in_output=included)
    output.push(tokens(*b"ab"))
    output.push(finished("stop", ord("b")))
    assert output.text == ("ab" if included else "a")
    assert (output.finish_reason, output.stop_reason) == ("stop", ord("b"))


def test_end_of_text_that_is_ignored_is_a_token_like_others(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer, ignore_eos=True, skip_special_tokens=False)
    output.push(tokens(*b"a", EOS_IDS[0], *b"b"))
    output.push(finished())
    assert output.text == f"a{EOS}b"
    hidden = processor(tokenizer, ignore_eos=True)
    hidden.push(tokens(*b"a", EOS_IDS[0], *b"b"))
    assert hidden.text == "ab"


def test_prompt_logprobs_and_cached_tokens_are_kept(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer, prompt_logprobs=1, max_tokens=0)
    assert output.push(tokens(prompt_logprobs=[scores(7, -0.5)], cached_tokens=16)) is None
    output.push(finished())
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0].chosen.logprob == -0.5
    assert output.prompt_logprobs[0].chosen.data == b"\x07"


def test_failure_is_raised_as_it_was_meant(tokenizer: Tokenizer) -> None:
    failed = Failed(request_id="r", message="No.", status=429, type="requests", code="c", param="p", retry_after=2.5)
    with pytest.raises(RequestError, match=r"No\.") as caught:
        processor(tokenizer).push(failed)
    error = caught.value
    assert (error.status, error.type, error.code, error.param) == (429, "requests", "c", "p")
    assert error.retry_after == 2.5


def test_cache_report_and_pin_are_kept(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer)
    report = CacheReport(prompt_tokens=9, cached_tokens=0, reason="unseen")
    output.push(tokens(*b"a", cache_report=report))
    output.push(tokens(*b"b"))
    output.push(msgspec.structs.replace(finished(), pinned_tokens=16, pin_id=3))
    assert output.cache_report is report
    assert (output.pinned_tokens, output.pin_id) == (16, 3)


@given(data=st.data())
def test_deltas_add_up_however_tokens_arrive(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1).filter(lambda i: i not in EOS_IDS), max_size=30))
    stop = tuple(data.draw(st.lists(st.text("abc ", min_size=1, max_size=3), max_size=2)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    whole, pieces = processor(tokenizer, stop=stop), processor(tokenizer, stop=stop)
    whole.push(tokens(*ids))
    whole.push(finished())
    deltas = [pieces.push(tokens(*ids[start:end])) for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    deltas.append(pieces.push(finished()))
    assert "".join(delta.text for delta in deltas if delta) == pieces.text == whole.text
    assert (
        [token_id for delta in deltas if delta for token_id in delta.token_ids] == pieces.token_ids == whole.token_ids
    )
    assert pieces.stop_reason == whole.stop_reason
    assert not any(one in whole.text for one in stop)
