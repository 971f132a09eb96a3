"""`trunkline bench step`, `quality`, `offline` and `grammar` as commands, with the tiny model."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reference_model import load_reference
from tests.test_cli import fails
from tests.tiny import tiny_model
from trunkline.cli import main
from trunkline.models.tokenizer import load_tokenizer

TEXT = "hello world, what is that? " * 12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["bench", *arguments]) == 0
    return capsys.readouterr().out


ENGINE = ("--kv-cache-memory", "4MiB", "--threads", "1", "--dtype", "float32")


@pytest.mark.slow
def test_step(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "step",
        "--model",
        tiny,
        *ENGINE,
        "--batch-size",
        "1,2",
        "--context",
        "16",
        "--chunk",
        "8",
        "--repeat",
        "1",
    ]
    told = json.loads(run(capsys, *flags, "--json"))
    assert [(one["batch"], one["context"]) for one in told["decode"]] == [(1, 16), (2, 16)]
    assert all(one["seconds"] > 0 for one in told["decode"] + told["prefill"])
    text = run(capsys, *flags, "--batch-size", "1,100000")
    assert "does not fit" in text and "| prefill: tokens | behind cached |" in text


@pytest.mark.slow
def test_profile(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["step", "--profile", "--model", tiny, *ENGINE, "--batch-size", "1,2", "--context", "32", "--chunk", "16"]
    text = run(capsys, *flags, "--repeat", "3", "--output", str(tmp_path / "profile.json"))
    assert "Decode: 2 requests at context 32, each under a JSON schema." in text and "| a step " in text
    assert "Prefill: a prompt of 16 tokens." in text
    told = json.loads((tmp_path / "profile.json").read_text())
    kinds = [(step["requests"], step["tokens"], step["constrained"]) for step in told["steps"]]
    assert kinds == [(1, 1, False), (2, 2, False), (2, 2, True), (1, 16, False)] and told["machine"]["trunkline"]
    for step in told["steps"]:
        assert step["seconds"] == pytest.approx(sum(part["seconds"] for part in step["parts"]))
        assert all(part["seconds"] > 0 for part in step["parts"]) and step["weight_bytes"] > 0
        assert {"sampling", "masks", "scheduling", "IPC"} < {part["group"] for part in step["parts"]}


@pytest.mark.slow
def test_sizes_of_a_profile_are_checked_before_the_first(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trunkline.profiling.command._machine", lambda worker: None)
    monkeypatch.setattr("trunkline.profiling.profiler.Profiler.decode", lambda *_, **__: pytest.fail("measured"))
    flags = ["--profile", "--model", tiny, *ENGINE, "--max-num-batched-tokens", "64", "--repeat", "2"]
    code, line = fails(capsys, "bench", "step", *flags, "--batch-size", "1", "--context", "32", "--chunk", "64,65")
    assert code == 1 and "A chunk of 65 tokens is more than --max-num-batched-tokens, 64; raise that." in line


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_numbers_that_cannot_be_written_are_printed(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", tiny, *ENGINE, "--batch-size", "1", "--context", "16", "--chunk", "8", "--repeat", "1"]
    assert main(["bench", "step", *flags, "--output", "/dev/full"]) == 1
    captured = capsys.readouterr()
    assert "| decode: batch |" in captured.out
    assert (
        captured.err == "trunkline: error: --output is /dev/full, which cannot be written: No space left on device.\n"
    )


@pytest.mark.slow
def test_a_request_that_is_refused_is_one_sentence(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = fails(capsys, "bench", "offline", "--model", tiny, *ENGINE, "--prefix-len", "600")
    assert code == 1 and line.startswith("trunkline: error: This model's maximum context length is 512 tokens.")


@pytest.mark.slow
def test_quality_is_that_of_the_reference(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    flags = ["quality", "--model", tiny, *ENGINE, "--context", "32", "--windows", "2", str(tmp_path / "text.txt")]
    formats = ["--formats", "dtype=float32", "dtype=bfloat16,kv-cache-dtype=float32", "--baseline", "dtype=float32"]
    told: dict[str, Any] = json.loads(run(capsys, *flags, *formats, "--continuation-tokens", "8", "--json"))
    token_ids = load_tokenizer(tiny).encode(TEXT, add_special_tokens=False)[:64]
    with torch.inference_mode():
        logprobs = load_reference(tiny)(torch.tensor(token_ids).reshape(2, 32)).logits.float().log_softmax(-1)
    scored = [logprobs[row, at, token_ids[32 * row + at + 1]].item() for row in range(2) for at in range(31)]
    assert (told["tokens"], told["continuations"], told["continuation_tokens"]) == (62, 2, 8)
    exact, rounded = told["formats"]
    assert exact == told["baseline"], "measured once"
    assert exact["perplexity"] == pytest.approx(math.exp(-sum(scored) / len(scored)), rel=1e-4)
    assert rounded["settings"] == {"dtype": "bfloat16", "kv_cache_dtype": "float32"}
    assert rounded["perplexity"] == pytest.approx(exact["perplexity"] * rounded["perplexity_ratio"])
    assert rounded["perplexity"] != exact["perplexity"] and 0 < rounded["mean_absolute"] < 0.1
    assert rounded["same_likeliest"] > 0.9 and 0 <= rounded["same_tokens"] <= 8


@pytest.mark.slow
def test_quality_compares_with_full_precision_or_with_nothing(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By default on the shipped text."""
    flags = [
        "quality",
        "--model",
        tiny,
        "--threads",
        "1",
        "--kv-cache-memory",
        "4MiB",
        "--context",
        "16",
        "--windows",
        "2",
    ]
    head, _, *rows = run(capsys, *flags).splitlines()
    assert head == "30 tokens of the shipped text in windows of 16; 2 texts of 64 tokens written."
    assert [row.split(" | ")[:2] for row in rows[2:]] == [
        ["| as served".ljust(len(rows[0].split(" | ")[0])), "float16"],
        ["| baseline: dtype=float32, quantization=none, kv-cache-dtype=auto", "float32"],
    ]
    alone = run(capsys, *flags, "--baseline", "none", "--continuations", "0")
    assert alone.startswith("30 tokens of the shipped text in windows of 16.\n") and "baseline:" not in alone


@pytest.mark.slow
def test_offline(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "offline",
        "--model",
        tiny,
        *ENGINE,
        "--num-prompts",
        "3",
        "--prefix-len",
        "32",
        "--input-len",
        "16",
        "--output-len",
        "4",
    ]
    told = json.loads(run(capsys, *flags, "--json"))
    assert told["cold"]["output_tokens"] == told["warm"]["output_tokens"] == 12
    assert told["cold"]["prompt_tokens"] == 144 and told["warm"]["cached_tokens"] == 3 * 32
    assert "| warm |" in run(capsys, *flags)


@pytest.mark.slow
def test_grammar(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text('{"enum": ["x", "yes"]}')
    (tmp_path / "b.json").write_text('{"type": "nonsense"}')
    flags = ["grammar", str(tmp_path), "--model", tiny, "--backend", "llguidance", "--walks", "1", "--tokens", "8"]
    text = run(capsys, *flags)
    assert "1 of 2" in text and "b.json, llguidance: " in text
    told = json.loads(run(capsys, *flags, "--json"))
    assert [cost["schema"] for cost in told["costs"]] == ["a.json", "b.json"]
    assert told["costs"][0]["mask_seconds"] and told["machine"]["trunkline"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["step", "--batch-size", "0"], 2, "--batch-size is '0'; allowed are integers of at least 1, such as 128,1K."),
        (["step", "--context", "1k,many"], 2, "--context is 'many'; allowed is an integer"),
        (["step", "--repeat", "0"], 2, "--repeat is '0'; allowed is an integer of at least 1."),
        (
            ["step", "--output", "/no/such/folder/x.json"],
            1,
            "--output is /no/such/folder/x.json, whose folder does not",
        ),
        (["step", "--output", "/tmp"], 1, "--output is /tmp, which is a folder; name a file in it."),
        (["step", "--max-num-seq", "2"], 2, "unknown argument --max-num-seq; did you mean --max-num-seqs?"),
        (
            ["step", "--unknown"],
            2,
            "trunkline bench step: error: unknown argument --unknown; see trunkline bench step --help",
        ),
        (["quality", "--seed", "x"], 2, "trunkline bench quality: error: --seed is 'x'; allowed is an integer"),
        (["offline", "--unknown"], 2, "trunkline bench offline: error: unknown argument --unknown;"),
        (["offline", "--num-prompts", "2", "--prefix-len", "-1"], 1, "--prefix-len is -1; allowed is 0 and more."),
        (["quality", "/no/such/file"], 1, "The text /no/such/file cannot be read: No such file"),
        (
            ["quality", __file__, "--baseline", "float32"],
            1,
            "--baseline is 'float32'; allowed is a setting and its value",
        ),
        (["quality", "--formats", "dtype=float32,"], 1, "--formats is ''; allowed is a setting and its value"),
        (["quality", "--continuations", "-1"], 1, "--continuations is -1; allowed is 0 and more."),
        (["quality", "--context", "1"], 1, "--context is 1; allowed is 2 and more, since"),
        (["grammar", "/no/such/file.json"], 1, "cannot be read: No such file"),
        (["grammar", "x", "--backend", "lark"], 2, "--backend is 'lark'; allowed is one of auto, llguidance,"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str) -> None:
    seen, line = fails(capsys, "bench", *arguments)
    assert (seen, words in line) == (code, True), line
