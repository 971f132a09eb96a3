"""The text that is shipped, what is compared on it, and that packed weights are worth having: the real model loses next to nothing."""

import json
import math

import pytest

from trunkline.bench import quality
from trunkline.bench.quality import Measured, Scores
from trunkline.cli import main
from trunkline.models.checkpoint import builtin_model
from trunkline.models.tokenizer import load_tokenizer


def make_measured(settings: dict[str, str], *logprobs: float, written: list[tuple[int, ...]]) -> Measured:
    return Measured(settings, "stored somehow", Scores(list(logprobs), [1] * len(logprobs)), written)


def test_texts_part_at_the_first_difference() -> None:
    baseline = [(1, 2, 3, 4), (1, 2, 3, 4), (5, 6, 7, 8), (9, 9, 9, 9)]
    setting = [(1, 2, 3, 4), (1, 2, 0, 4), (0, 6, 7, 8), (9, 9, 9, 0)]
    assert quality.part(setting, baseline) == quality.Parting(same_tokens=(4 + 2 + 0 + 3) / 4, same_texts=0.25)


def test_the_first_quarter_of_the_first_windows_is_continued() -> None:
    asked = []

    def write(prompts, num_tokens):
        asked.append((prompts, num_tokens))
        return [(7,) * num_tokens for _ in prompts]

    pieces = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11]]
    found = quality.measure({}, "", pieces, lambda pieces: [], write, continuations=5, tokens=2)
    assert asked == [([[1, 2], [9]], 2)] and found.written == [(7, 7), (7, 7)]
    assert quality.measure({}, "", pieces, lambda pieces: [], write, continuations=0, tokens=2).written == []
    assert len(asked) == 1


def test_the_table_compares_each_with_the_baseline() -> None:
    half, quarter = math.log(1 / 2), math.log(1 / 4)
    baseline = make_measured({"dtype": "float32"}, half, half, written=[(1, 2)])
    one = make_measured({}, half, quarter, written=[(1, 3)])
    _, _, first, last = quality.table([one], baseline).splitlines()
    cells = [cell.strip() for cell in first.strip("| ").split("|")]
    assert cells[0] == "as served" and cells[3:] == ["1.4142", "100.00 %", "0.3466 (-0.3466)", "1.0; 0 % to the end"]
    cells = [cell.strip() for cell in last.strip("| ").split("|")]
    assert cells[0] == "baseline: dtype=float32" and cells[3:] == ["–"] * 4
    assert len(quality.table([one, baseline], baseline).splitlines()) == 4, "a baseline that is a format has one row"
    assert one.numbers(None).keys() == {"settings", "weights", "perplexity", "standard_error"}


def test_the_shipped_text_is_long_enough_and_holds_nothing_odd() -> None:
    text = quality.shipped_text()
    assert len(text.encode()) < 200_000 and all(character.isprintable() or character == "\n" for character in text)
    assert len(set(text.splitlines())) > 500, "nothing is repeated to make it long"
    assert len(load_tokenizer(builtin_model()).encode(text, add_special_tokens=False)) > 20_480


@pytest.mark.slow
@pytest.mark.real
def test_packed_weights_cost_less_than_a_hundredth_of_perplexity(capsys: pytest.CaptureFixture[str]) -> None:
    """20,000 tokens, three times: some minutes on two cores."""
    flags = ["--formats", "quantization=gguf", "quantization=int8", "--windows", "40", "--context", "512", "--json"]
    assert main(["bench", "quality", *flags]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tokens"] > 20_000
    for one in told["formats"]:
        assert abs(one["perplexity_ratio"] - 1) < 0.01, one
        assert one["same_likeliest"] > 0.9, one
    with capsys.disabled():
        for one in told["formats"]:
            print(
                f"\n{one['settings']}: perplexity × {one['perplexity_ratio']:.4f}, same likeliest {one['same_likeliest']:.4f}"
            )
