"""In which order to lay out documents whose order is the server's to choose, so that requests share what they read.

    order = DocumentOrder(tree)
    order.choose(namespace, head, [a, b, c])      # [2, 0, 1]: first c, then a, then b

A prompt is a head, then the documents, then a tail (the question). Two requests share the KV of a document only where
all that comes before it is the same, too, so five documents in the order of one retrieval rarely meet those of another.
Exact KV, nothing approximated: only the order is chosen, in two parts.

1  THE LONGEST CHAIN: of all ways to begin with some of these documents, the one of which most is cached already. Drawn
   for the documents a b c d, and what earlier requests left behind:

        head
        ├─ a              a      is cached, so one document is found if a comes first
        │  └─ x           a x    is of no use here: x isn't among the four
        └─ b              b d    is cached: b first, then d, finds two
           └─ d
              └─ y

   Of chains with equally much in the cache the one is taken that goes on as an order handed out a moment ago: that is
   being computed right now, or waits to be, so requests which arrive together meet, too.

2  THE REST, POPULAR FIRST: a document that many ask for is likely to be in the next request, so it stands early, where
   prefixes meet. Documents equally popular go by their digest, so equal sets are always laid out equally.

Walking changes nothing in the tree: no split, no recency, no hits. The counts of popularity are bounded, and age with
every choice, not with a clock. Token ids only; no text.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from trunkline.radix.events import Namespace, root_hash
from trunkline.radix.node import Node
from trunkline.radix.tree import RadixTree

MAX_COUNTS = 16_384  # documents whose popularity is remembered, of all namespaces together
MAX_CHAINS = 512  # beginnings handed out that are remembered: those of the last 100 requests with five documents
MAX_PROBES = 2_000  # documents tried at some place in the tree, for one choice; each takes microseconds
HALF_LIFE = 1_024  # choices after which a request counts half
MAX_WEIGHT = 1e100

DIGEST_BYTES = 16


class Place(NamedTuple):
    """A place in the tree, at the end of a page.

    node    the run it lies in; a Root has none
    offset  bytes of that run that lie before it
    rest    bytes of tokens read since that page: less than a page
    """

    node: Node
    offset: int
    rest: bytes


class Chain(NamedTuple):
    """Documents laid out so far, while looking for the longest chain."""

    order: tuple[int, ...]
    name: bytes  # of the head and these documents
    place: Place | None  # where they end in the tree; None if they aren't cached to the end
    num_cached: int  # bytes of tokens: of the documents up to the last that is cached,
    num_expected: int  # and of those after it, which will be cached soon


class Documents(NamedTuple):
    """What there is to lay out: all three are one per document, or per position."""

    tokens: Sequence[bytes]
    digests: Sequence[bytes]
    glue: Sequence[bytes]

    def at(self, position: int, index: int) -> bytes:
        """The tokens of document `index`, laid out as number `position`."""
        return self.glue[position] + self.tokens[index] if self.glue else self.tokens[index]


class DocumentOrder:
    """Chooses the order of documents.

    tree  only looked at
    """

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        # The weight of a request doubles every HALF_LIFE choices: the same as halving all that was counted before.
        self._weight = 1.0
        self._counts: OrderedDict[tuple[Namespace, bytes], float] = OrderedDict()  # least recently seen first
        self._chains: OrderedDict[bytes, None] = OrderedDict()  # names of beginnings handed out, oldest first

    def choose(
        self,
        namespace: Namespace,
        head: bytes,
        documents: Sequence[bytes],
        *,
        glue: Sequence[bytes] = (),
        count: bool = True,
    ) -> list[int]:
        """The indices of `documents`, each once, in the order to lay them out.

        head       bytes of int32: the tokens before the first document
        documents  bytes of int32: the tokens of each
        glue       bytes of int32: what stands before the first, the second, … document, whichever it is; () for nothing
        count      False: for a look only. The popularity of the documents stays as it is
        """
        digests = [_digest(document) for document in documents]
        scores = [self._counts.get((namespace, digest), 0.0) for digest in digests]
        popular = sorted(range(len(documents)), key=lambda index: (-scores[index], digests[index], index))
        start = Chain((), _digest(root_hash(namespace) + head), self._place(namespace, head), 0, 0)
        chain = self._longest(start, popular, Documents(documents, digests, glue)).order
        order = [*chain, *(index for index in popular if index not in chain)]
        if count:
            self._count(namespace, digests)
            self._hand_out(start.name, [digests[index] for index in order])
        return order

    # ---- 1: the longest chain

    def _place(self, namespace: Namespace, head: bytes) -> Place | None:
        root = self._tree.find_root(namespace)
        return None if root is None else self._follow(Place(root, 0, b""), head)

    def _longest(self, start: Chain, popular: Sequence[int], documents: Documents) -> Chain:
        """Depth first, popular documents first; of chains equally long the first that was found."""
        best, probes = start, MAX_PROBES
        unfinished = [start]
        while unfinished and probes > 0:
            chain = unfinished.pop()
            if (chain.num_cached, chain.num_expected) > (best.num_cached, best.num_expected):
                best = chain
            rest = [index for index in popular if index not in chain.order]
            probes -= len(rest)
            longer = (self._longer(chain, index, documents) for index in rest)
            unfinished.extend(reversed([chain for chain in longer if chain is not None]))
        return best

    def _longer(self, chain: Chain, index: int, documents: Documents) -> Chain | None:
        """The chain with one more document; None if that is neither cached nor about to be."""
        tokens = documents.at(len(chain.order), index)
        order, name = (*chain.order, index), _digest(chain.name + documents.digests[index])
        place = None if chain.place is None else self._follow(chain.place, tokens)
        if place is not None:
            return Chain(order, name, place, chain.num_cached + len(tokens), 0)
        if name in self._chains:
            return Chain(order, name, None, chain.num_cached, chain.num_expected + len(tokens))
        return None

    def _follow(self, place: Place, tokens: bytes) -> Place | None:
        """Where `tokens` end, read on from a place; None if not all of their whole pages are cached."""
        page_bytes = self._tree.page_bytes
        node, offset, rest = place
        tokens = rest + tokens
        at, stop = 0, len(tokens) // page_bytes * page_bytes
        while at < stop:
            if offset == len(node.tokens):
                child = node.children.get(tokens[at : at + page_bytes])
                if child is None:
                    return None
                node, offset = child, 0
            length = min(len(node.tokens) - offset, stop - at)
            if not node.tokens.startswith(tokens[at : at + length], offset):
                return None
            offset += length
            at += length
        return Place(node, offset, tokens[stop:])

    # ---- 2: popularity

    def _count(self, namespace: Namespace, digests: Sequence[bytes]) -> None:
        self._weight *= 2 ** (1 / HALF_LIFE)
        if self._weight > MAX_WEIGHT:
            for key in self._counts:
                self._counts[key] /= self._weight
            self._weight = 1.0
        for digest in dict.fromkeys(digests):  # a document sent twice counts once
            key = (namespace, digest)
            self._counts[key] = self._counts.get(key, 0.0) + self._weight
            self._counts.move_to_end(key)
        while len(self._counts) > MAX_COUNTS:
            self._counts.popitem(last=False)

    def _hand_out(self, name: bytes, digests: Sequence[bytes]) -> None:
        """Remember the beginnings of an order that a request is about to be sent with."""
        for digest in digests:
            name = _digest(name + digest)
            self._chains[name] = None
            self._chains.move_to_end(name)
        while len(self._chains) > MAX_CHAINS:
            self._chains.popitem(last=False)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()
