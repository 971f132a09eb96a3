"""n > 1: requests of one group have the same prompt. One of them, the leader, reads it; the others, its followers, fork
its pages.

    add       r0 leads, r1 and r2 follow it          waiting with it, holding nothing
    plan      the last chunk of r0's prompt          its last logits are wanted three times: with the seed of each
    apply     three first tokens                     of one forward pass
              r1 and r2 get leases on r0's pages     whole pages are shared; one that is full in part is copied (FORK)
    plan      a token each for r0, r1 and r2         the copies come first

Whoever can't fork waits in the queue like everybody else, with the first token it has: no place or no pages are left,
or the prompt's own logprobs are wanted, which are computed, not shared. If a leader ends before its prompt is read, the
first of its followers leads the others; so it does for those who got no first token because the step already forks as many
as --max-num-seqs. What comes out is the same in every case; only how often a prompt is read
differs.
"""

from trunkline.config import SchedulerConfig
from trunkline.radix.cache import PrefixCache
from trunkline.scheduler.admission import Admission
from trunkline.scheduler.request import Request, State
from trunkline.step import CopyKind, PageCopy


class Groups:
    """Who reads the prompt, and who follows.

    copies  of pages, to be made at the beginning of the next plan; in order
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: PrefixCache,
        admission: Admission,
        running: list[Request],
        copies: list[PageCopy],
    ) -> None:
        """`running` and `copies` are the scheduler's own lists: who is forked, and what is copied, is appended."""
        self.config = config
        self.cache = cache
        self.admission = admission
        self.running = running
        self.copies = copies
        self._leaders: dict[str, Request] = {}  # by group; their prompts are yet to be read

    def leader_of(self, request: Request) -> Request | None:
        """The request of the same group that reads the prompt for it; None: it has to read the prompt itself.

        Prompt, namespace and grammar are compared: a group's name is the caller's word, no proof. With the same grammar,
        all of them have it at the same time, and so can choose their first tokens together.
        """
        leader = self._leaders.get(request.group) if self._can_share(request) else None
        if leader is None or (leader.namespace, leader.tokens, leader.grammar) != (
            request.namespace,
            request.tokens,
            request.grammar,
        ):
            return None
        return leader

    def lead(self, request: Request) -> None:
        """Let others of its group follow the request, unless another one leads them already."""
        if self._can_share(request):
            self._leaders.setdefault(request.group, request)

    def follow(self, leader: Request, request: Request) -> None:
        """Wait for the leader to read the prompt."""
        request.state = State.FOLLOWING
        request.leader = leader
        leader.followers.append(request)

    def _can_share(self, request: Request) -> bool:
        return bool(request.group) and self.cache.enabled and request.wants_token and not request.wants_prompt_logprobs

    def leave(self, follower: Request) -> None:
        """The follower follows no more, whatever it does next."""
        assert follower.leader is not None
        follower.leader.followers.remove(follower)
        follower.leader = None

    def disband(self, leader: Request) -> None:
        """The leader has read its prompt, or never will: the first that still follows reads it for the others."""
        if self._leaders.get(leader.group) is not leader:
            return
        del self._leaders[leader.group]
        if not leader.followers:
            return
        first, *others = leader.followers
        leader.followers = []
        first.leader = None
        first.followers = others
        for follower in others:
            follower.leader = first
        self._leaders[leader.group] = first
        self.admission.enqueue(first)

    def fork(self, leader: Request, request: Request, step: int) -> bool:
        """Let `request`, which knows the leader's prompt and one token more, run on the leader's pages. False changes
        nothing.

        step  the next one, which makes the copy

        One page more must be free, as at every admission, so that nobody is preempted for it in the next steps.
        """
        lease, num_prompt = leader.lease, leader.num_prompt
        if lease is None or len(self.running) >= self.config.max_num_seqs:
            return False
        num_private = self.cache.num_pages_of(num_prompt + 1) - lease.num_shared
        if self.cache.available < num_private + 1:
            return False
        forked = self.cache.fork(lease, num_private)
        if forked is None:
            return False
        whole = num_prompt // self.cache.page_size
        if num_prompt % self.cache.page_size:
            source, target = lease.pages[whole : whole + 1].copy(), forked.pages[whole : whole + 1].copy()
            self.copies.append(PageCopy(CopyKind.FORK, source, target))
        request.lease = forked
        request.num_computed = request.num_planned = num_prompt
        request.state = State.RUNNING
        request.forked_in = step
        self.running.append(request)
        return True
