"""Where everything is in a schema document, and where its references lead. Nothing outside of the document is ever fetched.

    {"$id": "http://a/b", "properties": {"x": {"$ref": "c#y"}}, "$defs": {"C": {"$id": "c", "$anchor": "y"}}}
    resolve("c#y", at /properties/x)   ──►   /$defs/C

Bases and identifiers are those of RFC 3986 and of the draft that each part is written in.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

from trunkline.errors import shown
from trunkline.grammar.interface import InvalidSchema, Unsupported
from trunkline.grammar.schema.keywords import IN_PLACE, Draft, draft_of, known, subschemas, token


class Place(NamedTuple):
    """Of a schema in a document.

    pointer  JSON pointer from the root
    base     URI without fragment, which relative ones are joined to
    draft    that it is written in
    depth    schemas around it, itself included
    """

    pointer: str
    base: str
    draft: Draft
    depth: int


Visit = Callable[[dict[str, Any], Place], None]


class Document:
    """All schemas of a document, by their pointers.

    `visit` is called for each schema object before what is inside of it is read; it raises InvalidSchema if that cannot be
    done. Without it the schema must have been checked. Raises InvalidSchema for references that lead nowhere, and for what
    leads back to itself without going into the value.
    """

    def __init__(self, schema: dict[str, Any] | bool, visit: Visit | None = None) -> None:
        self.root = schema
        self.schemas: dict[str, dict[str, Any] | bool] = {}
        self.places: dict[str, Place] = {}
        self.targets: dict[tuple[str, str], str] = {}  # (pointer of a schema, keyword) -> pointer of what it refers to
        self._visit = visit
        self._in_order: list[str] = []  # pointers of schemas; more may be found while references are followed
        self._resources: dict[str, str] = {"": ""}  # URI -> pointer
        self._anchors: dict[tuple[str, str], str] = {}  # (URI, name) -> pointer
        self._dynamic: dict[str, list[str]] = {}  # name -> pointers of $dynamicAnchor; "" for $recursiveAnchor
        self._walk(schema, Place("", "", draft_of(schema), 1))
        self._resolve_all()

    @property
    def draft(self) -> Draft:
        """Of the root."""
        return self.places[""].draft

    # Walking

    def _walk(self, schema: Any, place: Place) -> None:
        """Depth first; a document is not deep (meta checks that), but may hold schemas by the thousand."""
        waiting = [(schema, place)]
        while waiting:
            node, place = waiting.pop()
            if place.pointer in self.schemas:
                continue
            if isinstance(node, dict):
                place = self._identified(node, place)
            self.schemas[place.pointer] = node
            self._in_order.append(place.pointer)
            self.places[place.pointer] = place
            if isinstance(node, dict):
                if self._visit is not None:
                    self._visit(node, place)
                self._note_anchors(node, place)
                inside = [
                    (child, place._replace(pointer=place.pointer + step, depth=place.depth + 1))
                    for _, step, child in subschemas(node, place.draft)
                ]
                waiting += reversed(inside)

    def _identified(self, node: dict[str, Any], place: Place) -> Place:
        """The place, with what the schema's own identifier changes."""
        draft = place.draft
        if place.pointer and "$schema" in node:
            stated = draft_of(node, draft)
            if isinstance(node.get(stated.id_keyword), str):
                draft = stated
        uri = node.get(draft.id_keyword)
        if not isinstance(uri, str) or (draft.ignores_ref_siblings and "$ref" in node):
            return place
        uri, _, fragment = uri.partition("#")
        if uri:
            base = _join(place.base, uri, place.pointer, draft.id_keyword)
            place = place._replace(base=base, draft=draft)
            self._resources.setdefault(base, place.pointer)
        if fragment and (draft <= Draft.DRAFT_7 or draft is Draft.UNSTATED) and not fragment.startswith("/"):
            self._anchors.setdefault((place.base, fragment), place.pointer)
        return place

    def _note_anchors(self, node: dict[str, Any], place: Place) -> None:
        for keyword in ("$anchor", "$dynamicAnchor"):
            name = node.get(keyword)
            if isinstance(name, str) and known(keyword, place.draft):
                self._anchors.setdefault((place.base, name), place.pointer)
                if keyword == "$dynamicAnchor":
                    self._dynamic.setdefault(name, []).append(place.pointer)
        if node.get("$recursiveAnchor") is True and known("$recursiveAnchor", place.draft):
            self._dynamic.setdefault("", []).append(place.pointer)

    # Resolving

    def _resolve_all(self) -> None:
        """Follow every reference; what lies at its end becomes a schema too, if it was none."""
        at = 0
        while at < len(self._in_order):
            pointer = self._in_order[at]
            at += 1
            node, place = self.schemas[pointer], self.places[pointer]
            if not isinstance(node, dict):
                continue
            for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
                if keyword in node and known(keyword, place.draft):
                    self.targets[pointer, keyword] = self._resolve(node[keyword], keyword, place)
                    if place.draft.ignores_ref_siblings:
                        break

    def _resolve(self, ref: str, keyword: str, place: Place) -> str:
        uri, _, fragment = ref.partition("#")
        base = _join(place.base, uri, place.pointer, keyword) if uri else place.base
        resource = self._resources.get(base)
        if resource is None:
            is_remote = urlsplit(base).scheme in ("http", "https", "file", "ftp")
            reason = "is outside of this schema, and nothing is fetched" if is_remote else "leads nowhere"
            raise InvalidSchema(place.pointer, keyword, f"{shown(ref)} {reason}")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            target = self._anchors.get((base, fragment))
            if target is None:
                raise InvalidSchema(place.pointer, keyword, f"{shown(ref)} leads nowhere: no anchor has that name")
            return target
        return self._follow(resource, fragment, ref, keyword, place)

    def _follow(self, resource: str, fragment: str, ref: str, keyword: str, place: Place) -> str:
        """Step by step from a resource; schemas on the way may change the base."""
        node: Any = self.schemas[resource]
        pointer = resource
        nearest = self.places[resource]
        for part in fragment.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and key in node:
                node = node[key]
            elif (
                isinstance(node, list)
                and key.isascii()
                and key.isdigit()
                and str(int(key[:9])) == key
                and int(key) < len(node)
            ):
                node = node[int(key)]
            else:
                raise InvalidSchema(place.pointer, keyword, f"{shown(ref)} leads nowhere")
            pointer += token(key)
            nearest = self.places.get(pointer, nearest)
        if not isinstance(node, dict | bool):
            raise InvalidSchema(place.pointer, keyword, f"{shown(ref)} leads to something that is no schema")
        if pointer not in self.schemas:
            self._walk(node, nearest._replace(pointer=pointer, depth=nearest.depth + 1))
        return pointer

    def static_target(self, pointer: str, keyword: str) -> str:
        """Where a reference leads. Raises Unsupported if that depends on the way by which one came there."""
        target = self.targets[pointer, keyword]
        node = self.schemas[target]
        if keyword == "$ref" or not isinstance(node, dict):
            return target
        place = self.places[pointer]
        if keyword == "$recursiveRef":
            name, is_dynamic = "", node.get("$recursiveAnchor") is True
        else:
            schema = self.schemas[pointer]
            assert isinstance(schema, dict)
            name = unquote(schema[keyword].partition("#")[2])
            is_dynamic = bool(name) and node.get("$dynamicAnchor") == name
        if is_dynamic and any(other != target for other in self._dynamic.get(name, [])):
            raise Unsupported(
                place.pointer, keyword, "more than one schema can be meant, depending on where one comes from"
            )
        return target

    # What applies to the same value

    def _in_place(self, pointer: str) -> Iterator[str]:
        node, place = self.schemas[pointer], self.places[pointer]
        if not isinstance(node, dict):
            return
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if (pointer, keyword) in self.targets:
                yield self.targets[pointer, keyword]
        for keyword, step, _ in subschemas(node, place.draft):
            if keyword in IN_PLACE:
                yield pointer + step

    def check_cycles(self) -> None:
        """Raises InvalidSchema for a schema that applies itself to the same value: checking would never end."""
        done: set[str] = set()
        for start in self.schemas:
            if start in done:
                continue
            path = [(start, self._in_place(start))]
            on_path = {start}
            while path:
                pointer, inside = path[-1]
                following = next(inside, None)
                if following is None:
                    path.pop()
                    on_path.discard(pointer)
                    done.add(pointer)
                elif following in on_path:
                    raise InvalidSchema(pointer, "$ref", "it leads back to itself without going into the value")
                elif following not in done:
                    on_path.add(following)
                    path.append((following, self._in_place(following)))


def _join(base: str, uri: str, pointer: str, keyword: str) -> str:
    """RFC 3986, and the same for URNs, which urllib does not join. Raises InvalidSchema for what is no URI."""
    try:
        scheme = urlsplit(uri).scheme
        return uri if scheme or not base else urljoin(base, uri)
    except ValueError as error:
        raise InvalidSchema(pointer, keyword, f"{shown(uri)} is no URI: {error}") from None
