"""What callers of the Python API pass: taken in every sensible form, and otherwise refused in a sentence."""

from typing import Any

import numpy as np
import pytest

from trunkline.errors import InvalidParameter
from trunkline.inputs import as_batch, check_labels, checked_sampling, token_ids_of
from trunkline.sampling import SamplingParams


@pytest.mark.parametrize(
    ("prompts", "batch"),
    [
        ("hello", ["hello"]),
        (["hello", "there"], ["hello", "there"]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        (np.array([1, 2]), [[1, 2]]),
        ([[1], "hello"], [[1], "hello"]),
        ({"prompt_token_ids": [1]}, [{"prompt_token_ids": [1]}]),
        ((text for text in ("a", "b")), ["a", "b"]),
        ([], []),
    ],
)
def test_one_prompt_or_several(prompts: Any, batch: list[Any]) -> None:
    assert as_batch(prompts) == batch


@pytest.mark.parametrize("prompts", [None, 5, b"hello"])
def test_no_prompt_at_all(prompts: Any) -> None:
    with pytest.raises(InvalidParameter, match="a list of prompts"):
        as_batch(prompts)


@pytest.mark.parametrize("given", [[1, 2], (1, 2), np.array([1, 2]), {"prompt_token_ids": np.array([1, 2], "<i4")}])
def test_token_ids(given: Any) -> None:
    token_ids = token_ids_of(given)
    assert token_ids == [1, 2]
    assert {type(token_id) for token_id in token_ids} == {int}


@pytest.mark.parametrize(
    "given",
    [None, 5, b"hello", [1.5], [1, "a"], ["1"], [None], {}, {"prompt_token_ids": "abc"}, {"prompt": [1]}, [[1]]],
)
def test_what_is_no_list_of_token_ids(given: Any) -> None:
    with pytest.raises(InvalidParameter, match="a list of token ids") as refused:
        token_ids_of(given)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize("given", [{"temperature": 0}, "greedy", SamplingParams, None])
def test_what_is_no_sampling(given: Any) -> None:
    with pytest.raises(InvalidParameter, match=r"SamplingParams\(temperature=0\)"):
        checked_sampling(given)


@pytest.mark.parametrize(
    ("labels", "param"),
    [
        ((5, 0, ""), "request_id"),
        (("\ud800", 0, ""), "request_id"),
        (("r", 0, 5), "cache_salt"),
        (("r", 0, "a\udfff"), "cache_salt"),
        (("r", "high", ""), "priority"),
        (("r", 1.5, ""), "priority"),
        (("r", True, ""), "priority"),
        (("r", 2**31, ""), "priority"),
    ],
)
def test_labels_that_the_engine_could_not_read(labels: tuple[Any, Any, Any], param: str) -> None:
    check_labels("r\U0001f600", -(2**31) + 1, "sält")
    with pytest.raises(InvalidParameter) as refused:
        check_labels(*labels)
    assert refused.value.param == param
