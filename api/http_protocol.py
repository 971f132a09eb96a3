"""Uvicorn's HTTP/1.1 with httptools, for the clients there are and for those that mean harm. Knows no request.

Upgrade   a proposal of another protocol is passed over, as RFC 9110 has it: Java's HTTP client offers HTTP/2 ("Upgrade: h2c")
          with the first request it sends. The parser would stop reading after its head, and its body would be lost
the head  is at most MAX_HEAD bytes long, and a little more: the parser would keep whatever comes
the end   of a connection is told to whoever answers its requests (disconnect.py)
"""

import re
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from trunkline.api.disconnect import EXTENSION, Callback, EndWatch

MAX_HEAD = 256 * 1024  # bytes of first line and headers; what is more is noticed with the next bytes that come
_UPGRADE = re.compile(rb"\r\n(?i:upgrade)(?=[ \t]*:)")  # ends of lines are of one case, and found at once
_PASSED_OVER = b"\r\nx-passed-over"


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    _is_between = True  # no request is being received: what comes next begins one
    _is_lost = False
    _num_head: int | None = None  # bytes that came while a head was received; None: none is

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watching: set[Callback] = set()  # of all requests, since those that are sent together wait for each other

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._is_lost = True
        while self._watching:
            self._watching.pop()()

    def _watch(self, callback: Callback) -> EndWatch:
        """As on_disconnect()."""
        if self._is_lost:
            self.loop.call_soon(callback)
        else:
            self.flow.resume_reading()  # after a long body it may rest, and nothing would be noticed
            self._watching.add(callback)
        return partial(self._watching.discard, callback)

    def data_received(self, data: bytes) -> None:
        if self._num_head is not None:
            self._num_head += len(data)
            if self._num_head > MAX_HEAD:
                message = f"The head of a request is longer than {MAX_HEAD} bytes."
                self.logger.warning(message)
                self.send_400_response(message)
                return
        if self._is_between:
            data = _without_upgrade(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._is_between, self._num_head = False, 0
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: {"watch": self._watch}}

    def on_headers_complete(self) -> None:
        self._num_head = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_between = True
        super().on_message_complete()


def _without_upgrade(data: bytes) -> bytes:
    """The same, but for the name of the header that proposes another protocol, if the whole head is there."""
    end = data.find(b"\r\n\r\n")
    if end < 0 or _UPGRADE.search(data, 0, end) is None:
        return data
    return _UPGRADE.sub(_PASSED_OVER, data[:end]) + data[end:]
