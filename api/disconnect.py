"""The watch over the connection behind a response: whoever works for a client is told when it goes away. Knows no endpoint.

    end_watch = on_disconnect(scope, receive, generation.close)
    …
    end_watch()

HttpProtocol, which knows when a connection is lost, tells it: an extension of ASGI, EXTENSION. Where another server is in front,
a task waits for its "http.disconnect". To make such a task and to cancel it takes as long as to read a request's body.
"""

import asyncio
from collections.abc import Callable

from starlette.types import Receive, Scope

EXTENSION = "trunkline.disconnect"  # {"watch": Callable[[Callback], EndWatch]}
Callback = Callable[[], None]
EndWatch = Callable[[], object]


def on_disconnect(scope: Scope, receive: Receive, callback: Callback) -> EndWatch:
    """Call back, once, when the client goes away, or soon if it has. The body must have been read.

    Returns what ends the watch; idempotent.
    """
    extension = scope.get("extensions", {}).get(EXTENSION)
    if extension is not None:
        watch: Callable[[Callback], EndWatch] = extension["watch"]
        return watch(callback)
    return asyncio.create_task(_wait(receive, callback)).cancel


async def _wait(receive: Receive, callback: Callback) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    callback()
