"""Whatever a request holds, the answer is one that /openapi.json describes: never a 5xx, and no schema violated. 2,000 examples.

The examples are made from the document: requests that are valid by it, and bodies that are wrong in some place. No server has a model
of a made-up name, and few made-up conversations can be read; so the model is always that of the server, and most valid bodies get a
prompt that can be read, and keep some of the fields that were made up. That a body is valid by the document doesn't mean that it is
served: no JSON schema says which grammars there are. That it is wrong does mean that it is refused.
"""

from collections import Counter
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation, BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from tests.api.serving import MODEL, Server
from tests.tiny import tiny_model
from trunkline.api import app, dashboard_feed
from trunkline.api.openapi import Route

pytestmark = [pytest.mark.real, pytest.mark.slow]

ROUTES = (*app.ROUTES, *dashboard_feed.ROUTES)
EXAMPLES = 2000
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
    negative_data_rejection,
    unsupported_method,
]
PAGE = "hello world, these are more than sixteen tokens"  # a pin has one page at least
READABLE = {
    "messages": [{"role": "user", "content": PAGE}],
    "prompt": PAGE,
    "input": PAGE,
    "query": "hello",
    "documents": ["hello", "world"],
    "tokens": [1, 2],
    "max_tokens": 8,
}
MOST_KEPT = 4  # of the fields that were made up: with all of them nearly every body is refused for one


def label(route: Route) -> str:
    return f"{route.method} {route.path}"


def parts(route: Route) -> int:
    """Of the examples: most where most can go wrong, few for another name of a route, and none beside the one that there is."""
    is_alias = next(other for other in ROUTES if other.endpoint is route.endpoint) is not route
    if route.bodies and not is_alias:
        return 8 if route.generates else 3
    return 1 if route.bodies or route.query or "{" in route.path else 0


UNIT = -(-EXAMPLES // sum(map(parts, ROUTES)))


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BaseSchema]:
    tiny = tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=256)
    flags = ["--served-model-name", MODEL, "--kv-cache-memory", "16MiB", "--generation-config", "vllm"]
    with Server(tiny, *flags) as server:
        yield schemathesis.openapi.from_url(f"{server.wait_ready().url}/openapi.json")


def served(body: dict, *, mends: bool, start: int, streams: bool) -> dict:
    """The body with the server's model and, if it `mends`, with what can be read, and some of its fields, from the one at `start` on;
    one in three is streamed, where that can be."""
    body = dict(body)
    if mends:
        needed = {name: value for name, value in READABLE.items() if name in body}
        others = sorted(body.keys() - needed.keys())
        kept = (others[start % len(others) :] + others[: start % len(others)])[:MOST_KEPT] if others else []
        body = {name: body[name] for name in kept} | needed
        if streams and start % 3 == 0:
            body["stream"] = True
    if isinstance(body.get("model"), str):
        body["model"] = MODEL
    return body


@pytest.mark.parametrize("route", ROUTES, ids=label)
def test_no_example_breaks_the_contract(schema: BaseSchema, route: Route) -> None:
    operation: APIOperation = schema[route.path.replace(":path}", "}")][route.method]
    seen: Counter[tuple[int, str]] = Counter()

    def run(mode: GenerationMode, num: int) -> None:
        @given(case=operation.as_strategy(generation_mode=mode), start=st.integers(0, 255))
        @settings(
            max_examples=max(1, num),
            database=None,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def example(case: Case, start: int) -> None:
            if isinstance(case.body, dict):
                mends = mode is GenerationMode.POSITIVE and start < 192
                case.body = served(case.body, mends=mends, start=start, streams=route.event is not None)
            response = case.call()
            kind = response.headers.get("content-type", [""])[0]
            seen[response.status_code, kind.split(";")[0]] += 1
            case.validate_response(response, checks=CHECKS)

        example()

    num = UNIT * parts(route)
    num_wrong = num // 3 if route.bodies else 0
    if num_wrong:
        run(GenerationMode.NEGATIVE, num_wrong)
    run(GenerationMode.POSITIVE, num - num_wrong)
    assert sum(seen.values()) >= num
    if num > UNIT:
        assert seen[200, "application/json"] > 0, "not all are refused"
        assert not route.event or seen[200, "text/event-stream"] > 0
