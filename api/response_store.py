"""Responses that were kept, to be read again and to be continued: in memory, bounded, each under the key that made it.

    store = ResponseStore(max_entries=4096, max_bytes=64 * 2**20)
    store.put(owner, "resp_1", response=b"{…}", items=b"[…]", previous=None)
    store.get(owner, "resp_1").response                     # raises ResponseNotFound
    store.chain(owner, "resp_2", max_bytes=32 * 2**20)      # [resp_1, resp_2]: what resp_2 continues, oldest first

When there is no room, the owner with most loses what it has not used for longest: nobody can push out others' responses by
making many. What is continued counts as used. Knows no HTTP and no model.
"""

from collections import OrderedDict
from typing import NamedTuple

from trunkline.api.errors import BodyTooLarge
from trunkline.errors import RequestError, shown


class ResponseNotFound(RequestError):
    """There is no such response any more, or there never was, or another key made it: which of them is not told."""

    status = 404
    code = "response_not_found"


class Kept(NamedTuple):
    """One response.

    response  JSON: the response object
    items     JSON: the list of the items that were sent for it
    previous  the response that it continues, if it does
    """

    response: bytes
    items: bytes
    previous: str | None

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items)


class _Shelf:
    """What one owner has; used last stands last."""

    def __init__(self) -> None:
        self.kept: OrderedDict[str, Kept] = OrderedDict()
        self.num_bytes = 0

    def remove(self, response_id: str) -> Kept:
        kept = self.kept.pop(response_id)
        self.num_bytes -= kept.num_bytes
        return kept


class ResponseStore:
    """Responses by owner and id.

    max_entries  responses, of all owners together; 0: nothing is kept
    max_bytes    of their JSON
    """

    def __init__(self, *, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._shelves: dict[str, _Shelf] = {}

    def put(self, owner: str, response_id: str, *, response: bytes, items: bytes, previous: str | None) -> None:
        """Keep it. One that is larger than all the room there is, is not kept, and nothing is lost for it."""
        kept = Kept(response, items, previous)
        if self._max_entries == 0 or kept.num_bytes > self._max_bytes:
            return
        shelf = self._shelves.setdefault(owner, _Shelf())
        shelf.kept[response_id] = kept
        shelf.num_bytes += kept.num_bytes
        while self.num_entries > self._max_entries:
            self._drop_oldest(max(self._shelves, key=lambda name: len(self._shelves[name].kept)))
        while self.num_bytes > self._max_bytes:
            self._drop_oldest(max(self._shelves, key=lambda name: self._shelves[name].num_bytes))

    def get(self, owner: str, response_id: str) -> Kept:
        """Raises ResponseNotFound."""
        return self._shelf(owner, response_id).kept[response_id]

    def delete(self, owner: str, response_id: str) -> None:
        """Raises ResponseNotFound."""
        self._remove(owner, self._shelf(owner, response_id), response_id)

    def chain(self, owner: str, response_id: str, *, max_bytes: int) -> list[Kept]:
        """A response and all that it continues, oldest first. They count as used.

        Raises ResponseNotFound if one of them is gone, BodyTooLarge if they have more than `max_bytes` together.
        """
        names: list[str] = []
        chain: list[Kept] = []
        num_bytes, name = 0, response_id
        while True:
            try:
                kept = self.get(owner, name)
            except ResponseNotFound:
                raise _gone(name, names) from None
            names.append(name)
            chain.append(kept)
            num_bytes += kept.num_bytes
            if num_bytes > max_bytes:
                error = BodyTooLarge(
                    f"The conversation that 'previous_response_id' continues has at least {num_bytes} bytes; allowed are {max_bytes}."
                    " Begin a new one with what still matters of it."
                )
                error.param = "previous_response_id"
                raise error
            if kept.previous is None:
                break
            name = kept.previous
        for name in names:  # without what they continue, the later ones are worth nothing: it goes last
            self._shelves[owner].kept.move_to_end(name)
        return chain[::-1]

    @property
    def num_entries(self) -> int:
        return sum(len(shelf.kept) for shelf in self._shelves.values())

    @property
    def num_bytes(self) -> int:
        return sum(shelf.num_bytes for shelf in self._shelves.values())

    def _shelf(self, owner: str, response_id: str) -> _Shelf:
        shelf = self._shelves.get(owner)
        if shelf is None or response_id not in shelf.kept:
            raise ResponseNotFound(
                f"The response {shown(response_id)} is not kept here: it was deleted, was made with 'store': false or another key, or"
                " had to make room for others; or the server was started again."
            )
        return shelf

    def _drop_oldest(self, owner: str) -> None:
        shelf = self._shelves[owner]
        self._remove(owner, shelf, next(iter(shelf.kept)))

    def _remove(self, owner: str, shelf: _Shelf, response_id: str) -> None:
        shelf.remove(response_id)
        if not shelf.kept:
            del self._shelves[owner]


def _gone(name: str, continued_by: list[str]) -> ResponseNotFound:
    what = f"The response {shown(name)}"
    if continued_by:
        what += f", which {shown(continued_by[-1])} continues,"
    return ResponseNotFound(
        f"{what} is not kept here (any more). Send the whole conversation in 'input', without 'previous_response_id'.",
        param="previous_response_id",
        code="previous_response_not_found",
    )
