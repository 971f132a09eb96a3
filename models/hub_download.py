"""The process that asks the Hugging Face hub for a model: python -m trunkline.models.hub_download, started by hub.py.

1  ask what the revision is          its commit, and which files it has; if the hub can't be asked, go to 4
2  choose the files                  hub.py
3  download those that are missing   all of that one commit, into the library's cache: blobs by content, and a folder of links for
                                     each commit. When all are there, note which commit the revision was
4  or take what the cache has        the commit that was noted when all its files were there

Uses what huggingface_hub has had since 0.34: HfApi.model_info, snapshot_download, constants and errors.
"""

import errno
import glob
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from trunkline.errors import ModelError, shown
from trunkline.models.hub import Choice, Found, HubName, Note, Refused, Told, Wanted, choose
from trunkline.units import format_bytes

MAIN = "main"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_UNFINISHED = re.compile(r".*\.[0-9a-f]{8}\.incomplete")  # a name that no later download would look for

Tell = Callable[[Told], None]


def main() -> None:
    """Answer one Wanted."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    wanted = msgspec.json.decode(sys.stdin.buffer.readline(), type=Wanted)
    threading.Thread(target=_watch_parent, daemon=True).start()
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else is printed

    def tell(told: Told) -> None:
        os.write(answers, msgspec.json.encode(told) + b"\n")

    try:
        told: Told = Found(str(find(wanted, tell)))
    except ModelError as error:
        told = Refused(str(error))
    tell(told)


def find(wanted: Wanted, tell: Tell) -> Path:
    """The folder or the GGUF file. Raises ModelError."""
    from huggingface_hub import constants

    hub = Hub(wanted.name, wanted.revision, constants.ENDPOINT)
    cache = Cache.of(wanted.name.repository, wanted.download_dir or constants.HF_HUB_CACHE)
    if constants.HF_HUB_OFFLINE:
        return cache.take(wanted, "$HF_HUB_OFFLINE is set", tell, is_warning=False)
    try:
        commit, sizes = hub.ask()
    except _failures() as error:
        if (refusal := hub.refusal(error)) is not None:
            raise refusal from error
        return cache.take(wanted, f"The hub at {hub.endpoint} can't be asked ({reason(error)})", tell)
    choice = choose(wanted.name, sizes, wanted.name.repository)
    folder = cache.folder / "snapshots" / commit
    missing = [file for file in choice.files if not (folder / file).exists()]
    if missing:
        size = sum(sizes[file] for file in missing)
        tell(Note(f"Downloading {_files(missing)}, {format_bytes(size)}, of {hub} at {commit[:8]} to {folder}."))
        try:
            hub.download(commit, missing, cache.root)
        except Exception as error:  # of whatever transfers the files: hf_xet has exceptions of its own
            raise hub.refusal(error) or hub.failed(error, size, cache.root) from error
    cache.note(wanted.revision or MAIN, commit)
    return folder / choice.model


class Hub(NamedTuple):
    """One repository there."""

    name: HubName
    revision: str | None
    endpoint: str  # without a slash at the end

    def __str__(self) -> str:
        return self.name.repository

    def ask(self) -> tuple[str, dict[str, int]]:
        """The commit, and the size of each file in bytes."""
        from huggingface_hub import HfApi, constants, errors

        try:
            info = HfApi(endpoint=self.endpoint).model_info(
                self.name.repository,
                revision=self.revision or MAIN,
                files_metadata=True,
                timeout=constants.HF_HUB_ETAG_TIMEOUT,
            )
            if not _COMMIT.fullmatch(info.sha or ""):
                raise ValueError("no commit")
            return str(info.sha), {file.rfilename: file.size or 0 for file in info.siblings or ()}
        except errors.HFValidationError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError):  # e.g. a page on which to sign in to a network
            raise ConnectionError("its answer is not that of a hub") from None

    def download(self, commit: str, files: Sequence[str], cache: Path) -> None:
        """With the library's own progress bar, several at a time."""
        from huggingface_hub import snapshot_download

        snapshot_download(
            self.name.repository,
            revision=commit,
            allow_patterns=[glob.escape(file) for file in files],
            cache_dir=cache,
            endpoint=self.endpoint,
        )

    def refusal(self, error: Exception) -> ModelError | None:
        """What the hub says no to; None if it did not say anything."""
        from huggingface_hub import errors, get_token

        sign_in = (
            "see that the account of your token may read it"
            if get_token()
            else "put a token of an account that may read it into $HF_TOKEN, or run hf auth login"
        )
        cause: BaseException | None = error
        while isinstance(cause, errors.LocalEntryNotFoundError):  # the library's "and it is not in the cache"
            cause = cause.__cause__
        status = cause.response.status_code if isinstance(cause, errors.HfHubHTTPError) else None
        if isinstance(cause, errors.GatedRepoError):
            then = " with the account of your token" if get_token() else f", then {sign_in}"
            return ModelError(f"{self} is gated: accept its terms at {self.endpoint}/{self}{then}.")
        if isinstance(cause, errors.RevisionNotFoundError):
            return ModelError(
                f"--revision is {shown(self.revision or MAIN)}, which {self} does not have; allowed is a branch, a tag or a commit."
            )
        if (
            isinstance(cause, errors.HFValidationError | errors.RepositoryNotFoundError)
            or status == 404
            or (status == 401 and not get_token())
        ):
            return ModelError(
                f"{self} is neither a path on this machine nor a model that {self.endpoint} shows to you: see how it is spelt; if it is"
                f" private, {sign_in}."
            )
        if status == 401:
            return ModelError(
                f"{self.endpoint} does not accept your token, which comes from $HF_TOKEN or hf auth login: it may be mistyped or have"
                f" expired; make a new one at {self.endpoint}/settings/tokens, or leave it out for models that are public."
            )
        if status is not None and status < 500 and status != 429:
            return ModelError(f"{self.endpoint} refuses {self} with status {status}: {sign_in}.")
        return None

    def failed(self, error: Exception, size: int, cache: Path) -> ModelError:
        """Why a download did not come to its end.

        size  of all that was missing, in bytes
        """
        number = getattr(error, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in reason(error):
            return ModelError(
                f"The disk is full: {self} needs {format_bytes(size)} in {cache}; make room, or give another folder with --download-dir."
            )
        if number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            return ModelError(f"{cache} cannot be written ({reason(error)}): give another folder with --download-dir.")
        return ModelError(
            f"The download of {self} was interrupted ({reason(error)}); start again: files that were complete are kept."
        )


class Cache(NamedTuple):
    """The library's cache, and in it one repository.

    …/refs/main            the commit that main was
    …/snapshots/COMMIT     its files
    """

    root: Path
    folder: Path

    @classmethod
    def of(cls, repository: str, root: str) -> "Cache":
        path = Path(root).expanduser().absolute()
        return cls(path, path / f"models--{repository.replace('/', '--')}")

    def note(self, revision: str, commit: str) -> None:
        """Remember which commit this was, for when the hub can't be asked. That may fail: a cache can be read-only."""
        if _COMMIT.fullmatch(revision) or ".." in revision.split("/"):
            return
        file = self.folder / "refs" / revision
        with suppress(OSError):
            if not file.exists() or file.read_text() != commit:
                file.parent.mkdir(parents=True, exist_ok=True)
                unfinished = file.with_name(f"{file.name}.{os.getpid()}")
                unfinished.write_text(commit)
                unfinished.replace(file)

    def take(self, wanted: Wanted, why: str, tell: Tell, *, is_warning: bool = True) -> Path:
        """What is there of the revision.

        why  the hub is not asked: the beginning of a sentence
        """
        repository, revision = wanted.name.repository, wanted.revision or MAIN
        commit = revision
        if not _COMMIT.fullmatch(revision):
            with suppress(OSError):
                commit = (self.folder / "refs" / revision).read_text().strip()
        folder = self.folder / "snapshots" / commit
        if not _COMMIT.fullmatch(commit) or not folder.is_dir():
            raise ModelError(
                f"{why}, and {repository} at {revision} is not in {self.root}: download it where there is a network,"
                " or give a path."
            )
        files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        choice: Choice = choose(wanted.name, files, f"{why}, and {folder}")
        tell(Note(f"{why}: {repository} is taken from {folder}.", is_warning))
        return folder / choice.model


def reason(error: BaseException) -> str:
    """On one line, the cause of all: "Connection refused"."""
    while (cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        error = cause
    response: Any = getattr(error, "response", None)
    if response is not None:
        return f"status {response.status_code}"
    text = re.sub(r"\[Errno -?\d+\] ", "", " ".join(str(error).split()))
    return shown(text or type(error).__name__).strip("'\"")


def _files(files: Sequence[str]) -> str:
    return "1 file" if len(files) == 1 else f"{len(files)} files"


def _failures() -> tuple[type[Exception], ...]:
    """What the library raises, whichever HTTP client it has."""
    from huggingface_hub import errors

    return (errors.HTTPError, OSError, errors.HFValidationError)  # type: ignore[attr-defined]  # the first is that client's own


def _watch_parent() -> None:
    while os.read(0, 4096):
        pass
    _leave()


def _leave(*_: Any) -> None:
    """At once, for the library's threads would go on; what they have written so far is not left on the disk."""
    with suppress(OSError):
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                path = os.readlink(f"/proc/self/fd/{descriptor}")
                if _UNFINISHED.fullmatch(path):
                    os.unlink(path)
    os._exit(1)


if __name__ == "__main__":
    main()
