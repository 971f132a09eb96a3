"""Models by their names on the Hugging Face hub: which files of a repository are read here, and where they are on this machine.

find_model("path/to/model")              # the same path
find_model("org/name")                   # …/models--org--name/snapshots/COMMIT, downloaded if it is not there
find_model("org/name:Q4_K_M")            # …/COMMIT/name-Q4_K_M.gguf, of several GGUF files the one that is called so
find_model("org/name/folder/file.gguf")  # …/COMMIT/folder/file.gguf
find_model(None)                         # the built-in model

parent                                   child: python -m trunkline.models.hub_download, for as long as it takes
stdin  ──► Wanted, then kept open        end of file there means that the parent is gone: exit
stdout ◄── Note …, then Found or Refused
stderr                                   ours, for the library's progress bar

The library for the hub, its HTTP client and its threads never are in a server, and what they read of the environment ($HF_TOKEN,
$HF_ENDPOINT, $HF_HOME, $HF_HUB_OFFLINE, …) is read anew each time. Knows no torch.
"""

import logging
import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self, Unpack

import msgspec

from trunkline import child
from trunkline.config import EngineConfig, EngineFlags, engine_config
from trunkline.errors import ConfigError, ModelError, shown
from trunkline.models.checkpoint import PICKLES, builtin_model

logger = logging.getLogger("trunkline.models")

MOST_LISTED = 12  # files of a repository in a message

_NAME = re.compile(
    r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(:(?P<kind>[\w.-]+)|(?P<file>(/\w[\w .+-]*)+\.gguf))?", re.ASCII
)
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


class HubName(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody calls a model of the hub.

    repository  "org/name"
    kind        how the GGUF file's name ends: "Q4_K_M"; or None
    file        the GGUF file's path in the repository, or None
    """

    repository: str
    kind: str | None = None
    file: str | None = None

    @classmethod
    def of(cls, text: str) -> Self | None:
        """None for what can only be a path."""
        match = _NAME.fullmatch(text)
        if match is None or match["repository"].endswith(".gguf"):
            return None
        file = match["file"]
        return cls(repository=match["repository"], kind=match["kind"], file=file and file[1:])


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What the child is to find."""

    name: HubName
    revision: str | None  # a branch, a tag or a commit
    download_dir: str | None  # None: the library's own cache


class Note(msgspec.Struct, frozen=True, tag=True):
    """A line for the log."""

    text: str
    is_warning: bool = False


class Found(msgspec.Struct, frozen=True, tag=True):
    """The folder, or the GGUF file."""

    path: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Why there is no model: a sentence."""

    text: str


Told = Note | Found | Refused


def find_model(name: str | None, revision: str | None = None, download_dir: str | None = None) -> str:
    """The path of a model, which is downloaded if `name` is one of the hub's and there is no such path; None: the built-in one.

    revision      of a model of the hub: a branch, a tag or a commit; None: main
    download_dir  the cache; None: the library's own, ~/.cache/huggingface/hub if the environment does not say otherwise

    What is neither a path that exists nor a name of the hub is given back, for `open_checkpoint` to refuse.
    Raises ModelError, in one sentence, if the hub has nothing that can be served or can't be asked; ConfigError for the revision of
    something that has none.
    """
    wanted = None if name is None or os.path.exists(name) else HubName.of(name)
    if wanted is not None:
        return _ask(Wanted(name=wanted, revision=revision, download_dir=download_dir))
    if revision is not None:
        what = "the built-in model" if name is None else f"{shown(name)}, a path,"
        raise ConfigError(f"--revision is {shown(revision)}, but {what} has no revisions; leave it out.")
    return builtin_model() if name is None else name


def local_config(model: str | os.PathLike[str] | None, **flags: Unpack[EngineFlags]) -> EngineConfig:
    """`engine_config` of a model that is on this machine; None: the built-in one. Raises as both do."""
    return with_files(engine_config(find_model(None) if model is None else model, **flags))


def with_files(config: EngineConfig) -> EngineConfig:
    """The same settings of a model that is on this machine. Raises as `find_model`."""
    source = config.model
    path = find_model(source.path, source.revision, source.download_dir)
    return msgspec.structs.replace(
        config, model=msgspec.structs.replace(source, path=path, revision=None, download_dir=None)
    )


def _ask(wanted: Wanted) -> str:
    told: Told | None = None
    with subprocess.Popen(
        child.command("trunkline.models.hub_download"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child.environment(),
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(wanted) + b"\n")
            process.stdin.flush()
            for line in process.stdout:
                told = msgspec.json.decode(line, type=Told)
                if isinstance(told, Note):
                    logger.log(logging.WARNING if told.is_warning else logging.INFO, "%s", told.text)
        except BaseException:
            process.terminate()
            raise
    if isinstance(told, Found):
        return told.path
    if isinstance(told, Refused):
        raise ModelError(told.text)
    raise ModelError(
        f"The download of {wanted.name.repository} was cut off; start again: files that were complete are kept."
    )


# ---------------------------------------------------------------- which files


class Choice(NamedTuple):
    """Files of a repository that are read here, and which of them is the model: "" if it is their folder."""

    files: tuple[str, ...]
    model: str


def choose(name: HubName, files: Iterable[str], where: str) -> Choice:
    """What of these files, paths in the repository, has to be there.

    where  the repository in words, for messages: "org/name"

    Raises ModelError if there is nothing that can be served, or no way to tell which of several things is meant.
    """
    there = [file for file in files if ".." not in file.split("/")]
    ggufs = sorted(file for file in there if file.endswith(".gguf") and not _is_beside_model(file))
    if name.file is not None or name.kind is not None:
        return _one_gguf(name, there, ggufs, where)
    root = [file for file in there if "/" not in file]
    if "config.json" in root and any(_is_weights(file) for file in root):
        return Choice(tuple(file for file in there if _is_read(file, sentences="modules.json" in root)), "")
    whole = [file for file in ggufs if not _PART.search(file)]
    if len(whole) > 1:
        raise ModelError(
            f"{where} has {len(whole)} GGUF files; name one of them, such as {name.repository}/{whole[0]}, or by how its name ends,"
            f" such as {name.repository}:Q4_K_M. There are {_listed(whole)}."
        )
    if ggufs:
        return _served((whole or ggufs)[0], where)
    pickles = sorted(file for file in root if file.endswith(PICKLES))
    if pickles:
        raise ModelError(
            f"{where} has its weights only as pickles ({_listed(pickles)}), which can run code when they are read, so they are refused:"
            " look for another repository with safetensors, or for a --revision such as refs/pr/1 that adds them."
        )
    raise ModelError(
        f"{where} holds nothing that can be served: expected config.json with *.safetensors, or a .gguf file."
        f" There {'is' if len(root) == 1 else 'are'} {_listed(sorted(root)) or 'no files'}."
    )


def _one_gguf(name: HubName, there: Sequence[str], ggufs: Sequence[str], where: str) -> Choice:
    if name.file is not None:
        fitting = [file for file in there if file == name.file]
    else:
        ending = re.compile(rf"(^|[-._/]){re.escape(name.kind or '')}$", re.IGNORECASE)
        fitting = [file for file in ggufs if ending.search(_PART.sub("", file).removesuffix(".gguf"))]
    if len(fitting) == 1 or (fitting and all(map(_PART.search, fitting))):
        return _served(fitting[0], where)
    asked = f"the file {name.file}" if name.file is not None else f"GGUF file whose name ends in {name.kind}"
    if fitting:
        raise ModelError(
            f"{where} has more than one {asked}; name one of them, such as {name.repository}/{fitting[0]}."
            f" There are {_listed(fitting)}."
        )
    missing = f"does not have {asked}" if name.file is not None else f"has no {asked}"
    raise ModelError(f"{where} {missing}. Its GGUF files: {_listed(ggufs) or 'none'}.")


def _served(file: str, where: str) -> Choice:
    if _PART.search(file):
        raise ModelError(
            f"{where} has {file} in several parts, which are not read here: choose a file that is whole, or join them with"
            " llama.cpp's llama-gguf-split --merge and give the path."
        )
    return Choice((file,), file)


def _is_beside_model(file: str) -> bool:
    """llama.cpp's projectors of images, and what was measured to quantize by."""
    name = file.rpartition("/")[2].lower()
    return name.startswith("mmproj") or "imatrix" in name


def _is_weights(file: str) -> bool:
    """consolidated*.safetensors are the same weights once more, by their authors' own names."""
    return file.endswith(".safetensors") and not file.startswith(("consolidated", "adapter_model"))


def _is_read(file: str, *, sentences: bool) -> bool:
    """sentences: modules.json is there, whose modules have a config.json each (pooling.py)."""
    folder, slash, name = file.rpartition("/")
    if slash:
        return name == "config.json" and (sentences or folder == "1_Pooling") and "/" not in folder
    return file.endswith((".json", ".jinja")) or file == "tokenizer.model" or _is_weights(file)


def _listed(files: Sequence[str]) -> str:
    more = f" and {len(files) - MOST_LISTED} more" if len(files) > MOST_LISTED else ""
    return ", ".join(files[:MOST_LISTED]) + more
