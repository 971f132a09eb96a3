"""What a finished step chose for a request, as far as it holds, and what the caller is told. Decides nothing else.

Drafts are verified here. A row that follows a draft chose its token as if the draft were true: with the request's own
(seed, position) noise, and the penalties that the draft brings. So each row's choice holds if all drafts before it were
chosen, too, and the text is the same with and without drafts, at any temperature:

    drafts   7 5 9        the row before "7" chose 7: it was right; the next chose 5; the next 8, so "9" was wrong
    chosen   7 5 8 2      7 5 8 hold; 2 follows a token that is not there

A text that follows a grammar takes each token as soon as it is found to hold.
"""

from typing import NamedTuple

from trunkline.errors import RequestError
from trunkline.grammar.interface import MatcherFailed
from trunkline.messages import Failed, Finished, TokenLogprobs, Tokens
from trunkline.scheduler.request import Request
from trunkline.step import Int32, RowLogprobs, StepResult


class Chosen(NamedTuple):
    """The tokens that a request has gained, in order.

    token_ids     at least one, unless the first row failed
    logprobs      one per token, if asked for
    num_accepted  drafts that were right, of those looked at
    ended         True if the text ends with them: by an end-of-text or stop id that counts, or since nothing may follow
    stop_id       that id, the last token; None if it ended without
    failure       why the row after these tokens failed; None if it didn't, or if nobody needs it
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    num_accepted: int
    ended: bool = False
    stop_id: int | None = None
    failure: str | None = None


def chosen(request: Request, row: int, drafts: Int32, result: StepResult) -> Chosen:
    """What rows row, row + 1, … of a step chose, up to the first token that is not its draft, or that ends the text."""
    if request.text is None and not len(drafts) and request.sampling.logprobs is None and row not in result.failed:
        token_id = int(result.token_ids[row])  # as below, for nearly all
        ended = token_id in request.end_ids and request.ends_with(token_id, request.num_output + 1)
        return Chosen([token_id], None, 0, ended, token_id if ended else None)
    got = Chosen([], None if request.sampling.logprobs is None else [], 0)
    for at, draft in enumerate([*drafts.tolist(), None], start=row):
        if at in result.failed:
            return got._replace(failure=result.failed[at])
        token_id, scored = int(result.token_ids[at]), result.logprobs[at]
        ends = request.ends_with(token_id, request.num_output + len(got.token_ids) + 1)
        if request.text is not None and not ends:
            settled = request.text.settle(token_id)
            if settled is None:
                return got._replace(ended=True)
            if settled != token_id:
                token_id, scored = settled, result.fallback_logprobs.get(at)
                if got.logprobs is not None and scored is None:
                    break  # its logprob is not known after a draft: the next step chooses it again
            try:
                taken = request.text.take(token_id)
            except MatcherFailed as error:
                return got._replace(failure=f"The grammar cannot be followed any further: {error}")
            ends = not taken and request.text.ends_with(token_id)
            if not taken and not ends:
                return got._replace(failure=f"Token {token_id} was chosen, which the grammar does not allow.")
        got.token_ids.append(token_id)
        if got.logprobs is not None:
            got.logprobs.append(token_logprobs(scored))
        got = got._replace(num_accepted=got.num_accepted + (token_id == draft))
        if ends:
            return got._replace(ended=True, stop_id=token_id)
        if request.text is not None and request.text.is_over:
            return got._replace(ended=True)
        if token_id != draft:
            break
    return got


def tokens_message(request: Request, got: Chosen, now: float) -> Tokens:
    """What the caller is told of tokens that the request has already taken in; with the first, how long it took."""
    prompt_logprobs = None
    if not request.prompt_logprobs_sent:
        prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, []
        request.prompt_logprobs_sent = True
    report, request.cache_report = request.cache_report, None
    first = bool(got.token_ids) and request.num_output == len(got.token_ids)
    return Tokens(
        request_id=request.request_id,
        token_ids=got.token_ids,
        logprobs=got.logprobs,
        prompt_logprobs=prompt_logprobs,
        cached_tokens=request.cached_tokens or 0,
        cache_report=report,
        queue_seconds=request.admitted_at - request.arrival if first else None,
        prefill_seconds=now - request.admitted_at if first else None,
        grammar_seconds=request.compilation.seconds if first and request.compiles and request.compilation else None,
    )


def finished_message(request: Request, reason: str, stop_token_id: int | None = None) -> Finished:
    """The last word about a request that ended by itself: "stop" or "length"."""
    return Finished(
        request_id=request.request_id,
        reason=reason,
        stop_token_id=stop_token_id,
        prompt_tokens=request.num_prompt,
        cached_tokens=request.cached_tokens or 0,
        completion_tokens=request.num_output,
        draft_tokens=sum(source.num_drafts for source in request.drafting.values()),
        accepted_tokens=sum(source.num_right for source in request.drafting.values()),
        pinned_tokens=request.pin.num_tokens if request.pin is not None else 0,
        pin_id=request.pin.pin_id if request.pin is not None else None,
        grammar_backend=request.text.backend if request.text is not None else "",
        embedding=request.embedding,
        closed=request.text is not None and request.text.closed,
    )


def failed_message(request_id: str, error: RequestError) -> Failed:
    """The last word about a request that was refused."""
    return Failed(
        request_id=request_id,
        message=error.message,
        status=error.status,
        type=error.type,
        code=error.code,
        param=error.param,
        retry_after=error.retry_after,
    )


def token_logprobs(row: RowLogprobs | None) -> TokenLogprobs:
    assert row is not None
    return TokenLogprobs(row.token_ids.tolist(), row.logprobs.tolist(), row.rank)
