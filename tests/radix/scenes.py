"""Written lives of a prefix cache, for what random ones come to seldom. Audited after every step, as those are."""

from collections.abc import Callable

from tests.radix.life import Request
from tests.radix.machine import CacheMachine
from trunkline.radix.events import NOBODY, Namespace

Scene = Callable[[CacheMachine], None]


def read(life: CacheMachine, *tokens: int, namespace: Namespace = NOBODY) -> Request:
    """A request that is admitted, computed and shared, and still there."""
    request = wait(life, *tokens, namespace=namespace)
    life.admit(request, life.missing(request))
    assert request.lease is not None
    life.step(chunk=len(tokens), skip=None, in_flight=False, share=False)
    life.share(request)
    life.audit()
    return request


def wait(life: CacheMachine, *tokens: int, namespace: Namespace = NOBODY) -> Request:
    """A request that is only looked up."""
    request = Request(namespace, [*tokens], 0)
    life.requests.append(request)
    life.spoken.append(request.prefix)
    life.look_up(request, None)
    return request


def leave(life: CacheMachine, *requests: Request) -> None:
    for request in requests:
        life.release(request, tail=True, again=True)
        life.audit()


def cached(life: CacheMachine, *tokens: int, times: int = 1, namespace: Namespace = NOBODY) -> None:
    """Read so often, one request after the other; all but the last token can be found from the second on."""
    for _ in range(times):
        leave(life, read(life, *tokens, namespace=namespace))


def evict(life: CacheMachine, num_pages: int) -> None:
    life.evict(num_pages)
    life.audit()


# ---- page size 1, but for one: a token is a page


def to_look_up_is_to_use(life: CacheMachine) -> None:
    life.begin(num_pages=8, page_size=1, policy="lru", tenant_share=1.0, pinned_share=0.5)
    cached(life, 1, 1, 2, 2)
    cached(life, 1, 1, 3, 3)
    wait(life, 1, 1, 2, 2, 4)
    life.audit()
    evict(life, 3)


def what_is_found_makes_no_room_for_what_is_missing(life: CacheMachine) -> None:
    life.begin(num_pages=8, page_size=1, policy="lru", tenant_share=1.0, pinned_share=0.5)
    cached(life, 1, 2, 3, 4)
    request = wait(life, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    life.admit(request, life.missing(request))
    life.audit()
    assert request.lease is None


def what_is_evicted_after_a_tail_that_was_cut_off(life: CacheMachine) -> None:
    life.begin(num_pages=12, page_size=1, policy="lru", tenant_share=1.0, pinned_share=0.5)
    cached(life, 1, 1, 2, 2, 8)
    cached(life, 1, 1, 2, 2, 9)
    evict(life, 2)
    evict(life, 1)
    cached(life, 1, 1, 2, 7)
    evict(life, 1)


def a_tail_is_cut_off_and_comes_back(life: CacheMachine) -> None:
    life.begin(num_pages=8, page_size=1, policy="lru", tenant_share=1.0, pinned_share=0.5)
    cached(life, 1, 1, 2, 2)
    evict(life, 1)
    cached(life, 1, 1, 2, 2)
    evict(life, 1)
    evict(life, 2)


def a_twin_joins_what_was_cut_off_at_its_end(life: CacheMachine) -> None:
    life.begin(num_pages=12, page_size=1, policy="lru", tenant_share=1.0, pinned_share=0.5)
    twin = wait(life, 1, 1, 1, 1)
    life.admit(twin, 4)
    life.step(chunk=2, skip=None, in_flight=False, share=False)
    other = wait(life, 1, 1, 2)
    life.admit(other, 3)
    life.step(chunk=3, skip=0, in_flight=False, share=False)
    life.share(other)
    leave(life, other)
    evict(life, 1)
    for _ in range(3):
        life.share(twin)
        life.audit()
        life.step(chunk=1, skip=None, in_flight=False, share=False)
    assert life.cache.stats().nodes == 1


def what_is_said_after_a_tail_that_was_cut_off(life: CacheMachine) -> None:
    life.begin(num_pages=8, page_size=1, policy="lru", tenant_share=1.0, pinned_share=0.5)
    first = read(life, 1, 1, 2, 2)
    first.tokens.append(1)  # chosen, and never read
    life.spoken.append(first.prefix)
    leave(life, first)
    again = read(life, 1, 1, 2, 2, 3)
    life.guess(which=0, known=0, limit=5)
    leave(life, again)
    evict(life, 2)
    third = wait(life, 1, 1, 2, 3)
    life.admit(third, 1)
    life.guess(which=0, known=0, limit=5)


def what_is_said_after_half_a_page(life: CacheMachine) -> None:
    life.begin(num_pages=8, page_size=4, policy="lru", tenant_share=1.0, pinned_share=0.5)
    cached(life, 1, 2, 3, 4, 5, 6, 7, 8)
    life.admit(wait(life, 1, 2, 3, 4, 5, 6), 1)
    for known in range(3):
        life.guess(which=0, known=known, limit=8)


def a_pin_ends_when_it_is_time(life: CacheMachine) -> None:
    life.begin(num_pages=8, page_size=1, policy="lru", tenant_share=1.0, pinned_share=0.5)
    request = read(life, 1, 2, 3)
    life.pin(which=0, seconds=2)
    leave(life, request)
    for _ in range(3):
        life.time_passes(seconds=1)
        life.audit()
        evict(life, 1)


def pins_yield_in_the_order_of_their_ends(life: CacheMachine) -> None:
    life.begin(num_pages=12, page_size=1, policy="lru", tenant_share=1.0, pinned_share=1.0)
    requests = [read(life, token, token, token) for token in (1, 2, 3)]
    for which, seconds in enumerate((4, 1, 3)):
        life.pin(which, seconds)
        life.audit()
    leave(life, *requests)
    for num_pages in (3, 4, 6, 7):
        life.pins_yield(num_pages)
        life.audit()


def slru_lets_go_of_what_it_protected_longest(life: CacheMachine) -> None:
    """At most 16 pages are protected: 9 of the first prompt, until 8 of another are. Those of the first wait behind."""
    life.begin(num_pages=20, page_size=1, policy="slru", tenant_share=1.0, pinned_share=0.5)
    cached(life, *[1] * 10, times=2)
    cached(life, 3)
    cached(life, *[2] * 9, times=2)
    for _ in range(4):
        evict(life, 1)


def slru_forgets_pages_that_were_cut_off(life: CacheMachine) -> None:
    """4 of 9 protected pages are cut off, and so 8 more don't drive the others out."""
    life.begin(num_pages=20, page_size=1, policy="slru", tenant_share=1.0, pinned_share=0.5)
    cached(life, *[1] * 10, times=2)
    evict(life, 5)
    cached(life, *[2] * 9, times=2)
    cached(life, 3)
    for _ in range(3):
        evict(life, 1)


SCENES: tuple[Scene, ...] = (
    to_look_up_is_to_use,
    what_is_found_makes_no_room_for_what_is_missing,
    what_is_evicted_after_a_tail_that_was_cut_off,
    a_tail_is_cut_off_and_comes_back,
    a_twin_joins_what_was_cut_off_at_its_end,
    what_is_said_after_a_tail_that_was_cut_off,
    what_is_said_after_half_a_page,
    a_pin_ends_when_it_is_time,
    pins_yield_in_the_order_of_their_ends,
    slru_lets_go_of_what_it_protected_longest,
    slru_forgets_pages_that_were_cut_off,
)


def play(machine: type[CacheMachine]) -> None:
    """All of them."""
    for scene in SCENES:
        life = machine()
        scene(life)
        life.teardown()
