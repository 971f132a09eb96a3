"""What to send instead, for a path that no route has: routes of other servers by their names here, and typos.

    advice("/flush_cache", {"/v1/cache/flush": "POST", …})           "POST /v1/cache/flush does this here."
    advice("/v1/chat/completion", {"/v1/chat/completions": "POST"})  "Did you mean POST /v1/chat/completions?"

Knows no endpoint: a test holds the names below against the table of routes, and against docs/migrating.md.
"""

import difflib
from collections.abc import Mapping

ALIKE = 0.8  # of difflib's 0 to 1
LONGEST_ALIKE = 100  # characters: no path here is near so long

_HEALTH = "GET /health does this here: 503 until requests are taken, and while the server stops."
_BATCHES = "Files and batches are not there: 'trunkline run-batch' answers a file of requests."
_TEXT_ONLY = "That is not there: models read and write text only."

# A path, with all below it.
_ADVICE = {
    # vLLM's and SGLang's
    "/reset_prefix_cache": "POST /v1/cache/flush does this here.",
    "/flush_cache": "POST /v1/cache/flush does this here.",
    "/abort_request": "POST /v1/requests/{id}/cancel does this here.",
    "/generate": "POST /v1/completions does this here.",
    "/encode": "POST /v1/embeddings does this here.",
    "/get_model_info": "GET /v1/models does this here.",
    "/ping": _HEALTH,
    # llama.cpp's
    "/completion": "POST /v1/completions does this here.",
    "/embedding": "POST /v1/embeddings does this here.",
    "/slots": "GET /v1/queue does this here; there are no slots, only requests that run or wait.",
    "/props": "GET /v1/models does this here.",
    "/apply-template": "POST /tokenize does this here, for a body with 'messages'.",
    # Ollama's
    "/api/chat": "POST /v1/chat/completions does this here.",
    "/api/generate": "POST /v1/completions does this here.",
    "/api/tags": "GET /v1/models does this here.",
    # Kubernetes' habits
    "/ready": _HEALTH,
    "/readyz": _HEALTH,
    "/healthz": _HEALTH,
    "/livez": "GET /version does this here: it answers as long as the server runs.",
    # OpenAI's and Anthropic's
    "/v1/files": _BATCHES,
    "/v1/uploads": _BATCHES,
    "/v1/batches": _BATCHES,
    "/v1/messages/batches": _BATCHES,
    "/v1/audio": _TEXT_ONLY,
    "/v1/images": _TEXT_ONLY,
    "/v1/conversations": "That is not there: POST /v1/responses goes on from a 'previous_response_id'.",
}


def advice(path: str, methods: Mapping[str, str]) -> str:
    """A sentence; "" if there is none to give.

    methods  of each path there is: how it is asked for
    """
    for beginning, told in _ADVICE.items():
        if path == beginning or path.startswith(f"{beginning}/"):
            return told
    if len(path) > LONGEST_ALIKE:
        return ""
    near = difflib.get_close_matches(path.lower(), methods, n=1, cutoff=ALIKE)
    return f"Did you mean {methods[near[0]]} {near[0]}?" if near else ""
