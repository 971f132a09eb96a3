"""The bits of a row do not depend on its neighbours, on grouping, on how a prompt was cut, or on what was cached."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.triton.attention_factories import ARCH, LAYER, Requests, shared_run
from trunkline.kernels.triton import attention as module
from trunkline.kernels.triton import interpreter
from trunkline.kernels.triton.attention import Workspace, attention, decode_capacity, plan_attention

pytestmark = pytest.mark.skipif(not interpreter.is_on(), reason="on a GPU they agree within one height of tiles only")


@pytest.fixture(autouse=True, scope="module")
def _mended() -> None:
    interpreter.mend()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_grouped_and_flat(dtype: torch.dtype) -> None:
    segments = [[("a", 512), ("1", 3)], [("a", 512), ("2", 20)], [("3", 100)]]
    requests = Requests(segments, query=3, kv=1, dtype=dtype)
    chunks = requests.last_rows(2)
    assert torch.equal(requests.attend(chunks, [shared_run([0, 1], 0, 512)]), requests.attend(chunks))


@pytest.mark.slow
def test_three_levels_and_flat() -> None:
    """Also with runs of one reader, which the scheduler leaves out: readers that are prompts drop out of theirs."""
    segments = [
        [("system", 512), ("tools", 512), ("question", 512), ("1", 3)],
        [("system", 512), ("tools", 512), ("question", 512), ("2", 40)],
        [("system", 512), ("tools", 512), ("3", 100)],
        [("system", 512), ("4", 1)],
    ]
    requests = Requests(segments, query=4, kv=1, dtype=torch.bfloat16)
    chunks = [(0, 1538, 1539), (1, 1572, 1576), (2, 1030, 1124), (3, 512, 513)]
    runs = [([0, 1, 2, 3], 0, 512), ([0, 1, 2], 512, 1024), ([0, 1], 1024, 1536)]
    flat = requests.attend(chunks)
    for chosen in (runs, runs[:1], runs[1:2], [([0, 2], 512, 1024), ([1, 2], 0, 512)]):
        assert torch.equal(requests.attend(chunks, [shared_run(*run) for run in chosen]), flat), chosen
    row = 0
    for chunk in chunks:
        rows = chunk[2] - chunk[1]
        assert torch.equal(requests.attend([chunk]), flat[row : row + rows]), f"{chunk} alone"
        row += rows


@pytest.mark.parametrize("window", [0, 40])
def test_alone_and_in_a_batch(window: int) -> None:
    requests = Requests([[("a", 1)], [("b", 70)], [("c", 33)], [("d", 128)]], query=2, kv=1, dtype=torch.bfloat16)
    chunks = [(0, 0, 1), (1, 60, 70), (2, 32, 33), (3, 127, 128)]
    together = requests.attend(chunks, window=window)
    row = 0
    for request, first, last in chunks:
        for position in {first, last - 1}:
            alone = requests.attend([(request, position, position + 1)], window=window)
            assert torch.equal(alone[0], together[row + position - first]), f"request {request} at {position}"
        row += last - first


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_prompt_at_once_and_in_chunks(dtype: torch.dtype) -> None:
    """The tiles of prompts and those over splits, where a split ends in the middle."""
    requests = Requests([[("a", 520)]], query=8, kv=1, dtype=dtype)
    at_once = requests.attend([(0, 488, 520)])
    for first, last in ((505, 519), (519, 520)):
        assert torch.equal(requests.attend([(0, first, last)]), at_once[first - 488 : last - 488])


@pytest.mark.slow
@settings(max_examples=8)
@given(data=st.data())
def test_chunks_neighbours_and_paths(data: st.DataObject) -> None:
    """Prompts beside each other, cut anywhere, by both kinds of tiles: the bits of the prompt at once."""
    contexts = data.draw(st.lists(st.sampled_from([1, 30, 64, 100, 513, 530]), min_size=1, max_size=3))
    window = data.draw(st.sampled_from([0, 0, 33, 300]))
    requests = Requests(
        [[(str(index), context)] for index, context in enumerate(contexts)],
        query=data.draw(st.sampled_from([1, 3, 4])),
        kv=1,
        page_size=data.draw(st.sampled_from([16, 32, 64])),
        dtype=data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
    )
    firsts = [max(0, context - 40) for context in contexts]
    at_once = [
        requests.attend([(request, first, context)], window=window)
        for request, (first, context) in enumerate(zip(firsts, contexts, strict=True))
    ]
    cuts = [
        sorted({first, context, *data.draw(st.lists(st.integers(first, context), max_size=2))})
        for first, context in zip(firsts, contexts, strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PROMPT_ROWS", data.draw(st.sampled_from([1, 30, 10**6])))
        for step in range(max(map(len, cuts)) - 1):
            chunks = [(request, cut[step], cut[step + 1]) for request, cut in enumerate(cuts) if step + 1 < len(cut)]
            parts = requests.attend(chunks, window=window).split([last - first for _, first, last in chunks])
            for (request, first, last), rows in zip(chunks, parts, strict=True):
                begin = firsts[request]
                assert torch.equal(rows, at_once[request][first - begin : last - begin]), (contexts, cuts)


def test_page_size_does_not_matter() -> None:
    outputs = []
    for page_size in (16, 32, 64):
        requests = Requests([[("a", 100)]], query=2, kv=1, page_size=page_size)
        outputs.append(requests.attend([(0, 90, 100)]))
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_in_the_buffers_of_a_captured_graph() -> None:
    """One Work, workspace and set of tensors for steps that differ in everything; rows that pad them change nothing."""
    requests = Requests([[("a", 512), ("1", 9)], [("a", 512), ("2", 30)], [("3", 20)]], query=2, kv=1)
    kv = requests.pages(requests.last_rows())
    capacity = decode_capacity(4, 1024, kv, requests.query, ARCH)
    workspace = Workspace(capacity.parts, requests.query, requests.dim, "cpu")
    static = None
    for chunks, runs in (
        ([(0, 520, 521), (1, 541, 542), (2, 19, 20)], [([0, 1], 0, 512)]),
        ([(2, 18, 20), (1, 540, 541)], []),
        ([(2, 3, 4)], []),
    ):
        shared = [shared_run(*run) for run in runs]
        expected = requests.attend(chunks, shared, kv=kv)
        batch = requests.batch(chunks, shared)
        rows = len(batch.positions)
        padded = replace(
            batch,
            positions=torch.nn.functional.pad(batch.positions, (0, 4 - rows)),
            query_start=torch.cat([batch.query_start, batch.query_start[-1:]]),
            readers=torch.nn.functional.pad(batch.readers, (0, 1)),
        )
        work = plan_attention(padded, kv, requests.query, ARCH, capacity)
        if static is None:
            static = work.to("cpu")
        else:
            static.copy_(work)
        for tensor in (workspace.parts, workspace.logarithms):
            tensor.fill_(torch.nan)
        qkv = torch.nn.functional.pad(requests.rows(chunks), (0, 2 * requests.dim, 0, 4 - rows))
        out = torch.full((4, requests.query * requests.dim), torch.nan)
        attention(qkv, replace(padded, work=static), kv, LAYER, requests.dim**-0.5, out=out, workspace=workspace)
        assert torch.equal(out[:rows], expected)
