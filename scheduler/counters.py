"""What the engine counts, from its start on. Plain numbers."""


class Counters:
    """Totals since start."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.prompt_tokens_computed = 0
        self.generation_tokens = 0
        self.prefix_cache_queries = 0  # tokens looked up at admission: prompts, and what comes back preempted
        self.hits_by_tier = {"device": 0, "host": 0, "disk": 0}  # tokens found
        self.preemptions_by_way = {"recompute": 0, "swap": 0}  # how the request comes back
        # Verified, by source (drafts.py). What a grammar forces is right without being verified (constraints.py).
        self.draft_tokens = {"tree": 0, "prompt": 0, "grammar": 0}
        self.accepted_tokens = {"tree": 0, "prompt": 0, "grammar": 0}  # of those: they were right

    @property
    def prefix_cache_hits(self) -> int:
        """Tokens found at admission, in any tier."""
        return sum(self.hits_by_tier.values())

    @property
    def preemptions(self) -> int:
        return sum(self.preemptions_by_way.values())
