"""SamplingParams: every range refused by name, and what it says of its continuations."""

from typing import Any

import pytest

from trunkline import Constraint, SamplingParams
from trunkline.constraint import KINDS
from trunkline.errors import InvalidParameter
from trunkline.messages import Generate, decode_to_engine, encode
from trunkline.sampling import CONSTRAINT_NAMES

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("param", "allowed", "refused"),
    [
        ("n", [1, 128], [0, 129, 1.0, True, "1"]),
        ("max_tokens", [None, 0, 2**31 - 1], [-1, 2**31, 1.5]),
        ("min_tokens", [0, 5], [-1, None]),
        ("temperature", [0, 2, 0.3], [-0.1, 2.1, NAN, INFINITY, "1", True]),
        ("top_k", [-1, 0, 1], [-2, 1.0]),
        ("top_p", [0, 1], [-0.1, 1.1, NAN]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1, NAN]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1, INFINITY]),
        ("repetition_penalty", [0.01, 100], [0, 101, NAN]),
        ("logit_bias", [{}, {3: -100}, {0: 100.0}], [{-1: 1.0}, {"3": 1.0}, {3: 101}, {3: NAN}, [3]]),
        ("seed", [None, 0, -(2**63), 2**64 - 1], [2**64, -(2**63) - 1, 0.5]),
        ("logprobs", [None, 0, 20], [-1, 21, True]),
        ("prompt_logprobs", [None, 0, 20], [-1, 21]),
        ("stop", [(), ("a",)], [3, "", {"a"}, ("",), (3,), ("a",) * 65, ("a" * 1025,)]),
        ("stop_token_ids", [(), (2,)], [2, "2", (-1,), (2.0,), (1,) * 1025]),
        ("allowed_token_ids", [None, (2,), (0, 2**31 - 1)], [(), [], 2, (-1,), (2.0,), (1,) * 65_537]),
        ("bad_words", [(), ("a", " b")], ["a", ("",), [3], (3,), ("a",) * 1025, ("a" * 1025,)]),
        ("ignore_eos", [True, False], [1, None]),
    ],
)
def test_ranges(param: str, allowed: list[Any], refused: list[Any]) -> None:
    for value in allowed:
        assert getattr(SamplingParams(**{param: value}), param) == value
    for value in refused:
        with pytest.raises(InvalidParameter) as caught:
            SamplingParams(**{param: value})
        assert caught.value.param == param
        assert f"'{param}' is " in caught.value.message and "; allowed is " in caught.value.message


def test_sequences_may_be_lists_and_stop_a_string() -> None:
    given = SamplingParams(stop=["\n", "b"], stop_token_ids=[2], allowed_token_ids=[2, 3], bad_words=["a"])
    kept = SamplingParams(stop=("\n", "b"), stop_token_ids=(2,), allowed_token_ids=(2, 3), bad_words=("a",))
    assert given == kept and given.stop == ("\n", "b")
    assert SamplingParams(stop="\n\n").stop == ("\n\n",)
    sent = Generate(request_id="r", prompt=b"\x01\x00\x00\x00", sampling=given)
    assert decode_to_engine(encode([sent])) == [sent], "and a decoder's lists are tuples again"


def test_none_is_an_empty_sequence() -> None:
    assert SamplingParams(**dict.fromkeys(("stop", "stop_token_ids", "bad_words"))) == SamplingParams()  # type: ignore[arg-type]


@pytest.mark.parametrize(("param", "value"), [("allowed_token_ids", (2,)), ("bad_words", ("a",))])
def test_lists_of_tokens_and_a_constraint_exclude_each_other(param: str, value: Any) -> None:
    with pytest.raises(InvalidParameter, match=f"'{param}' is given, and the answer must follow a schema") as caught:
        SamplingParams(constraint=Constraint(regex="[0-9]+"), **{param: value})
    assert caught.value.param == param


def test_min_tokens_is_at_most_max_tokens() -> None:
    SamplingParams(max_tokens=3, min_tokens=3)
    with pytest.raises(InvalidParameter, match="'min_tokens' is 4; allowed is at most max_tokens, which is 3"):
        SamplingParams(max_tokens=3, min_tokens=4)


def test_continuations_count_the_seed_up_and_around() -> None:
    sampling = SamplingParams(n=3, seed=2**64 - 2, temperature=0.5)
    seeds = [2**64 - 2, 2**64 - 1, 0]
    assert sampling.continuations() == [SamplingParams(seed=seed, temperature=0.5) for seed in seeds]
    assert [one.seed for one in SamplingParams(n=2, seed=-1).continuations()] == [2**64 - 1, 0]


def test_without_a_seed_every_request_gets_a_fresh_one() -> None:
    first, second = SamplingParams(n=2).continuations(), SamplingParams(n=2).continuations()
    assert first[1].seed == (first[0].seed or 0) + 1
    assert first[0].seed != second[0].seed


@pytest.mark.parametrize("params", [{"logit_bias": {9: 1.0, 10: 1.0}}, {"stop_token_ids": (10,)}])
def test_token_ids_must_be_of_the_vocabulary(params: dict[str, Any]) -> None:
    sampling = SamplingParams(**params)
    sampling.check_vocabulary(11)
    (param,) = params
    with pytest.raises(InvalidParameter, match=f"'{param}' is 10; allowed is token ids from 0 to 9"):
        sampling.check_vocabulary(10)


def test_names_for_constraints_are_kinds_of_one() -> None:
    assert set(CONSTRAINT_NAMES.values()) <= set(KINDS)
    assert not set(CONSTRAINT_NAMES) & set(SamplingParams.__struct_fields__)


def test_greedy_and_penalizing() -> None:
    assert SamplingParams(temperature=0).greedy and SamplingParams(top_k=1).greedy
    assert not SamplingParams().greedy and not SamplingParams().penalizes
    assert SamplingParams(presence_penalty=0.5).penalizes
    assert SamplingParams(frequency_penalty=0.5).penalizes
    assert SamplingParams(repetition_penalty=0.5).penalizes


def test_all_of_it_reaches_the_engine() -> None:
    sampling = SamplingParams(
        seed=2**64 - 1, temperature=0.25, logit_bias={3: 1.5}, stop_token_ids=(7,), logprobs=2, ignore_eos=True
    )
    sent = Generate(request_id="r", prompt=b"\x01\x00\x00\x00", sampling=sampling)
    assert decode_to_engine(encode([sent])) == [sent]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("max_token", "SamplingParams has no parameter 'max_token'. Did you mean 'max_tokens'?"),
        ("stop_strings", "Did you mean 'stop"),
        (
            "structured_outputs",
            "no parameter 'structured_outputs'. Give constraint=Constraint(json_schema=…); `from trunk",
        ),
        ("guided_json", "no parameter 'guided_json'. Give constraint=Constraint(json_schema=…)"),
        ("guided_regex", "Give constraint=Constraint(regex=…)"),
        ("zzz", "SamplingParams has no parameter 'zzz'. There are n, max_tokens, "),
    ],
)
def test_a_misspelt_parameter_gets_the_nearest(name: str, words: str) -> None:
    with pytest.raises(TypeError) as refused:
        SamplingParams(temperature=0, **{name: 5})  # type: ignore[arg-type]
    assert words in str(refused.value)
