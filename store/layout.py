"""Define the file names of a store; no other module builds or parses them.

STORE.json                                format, least reader version, store id
LOCK                                      held by the job that writes (advisory, this machine only)
epochs/000003.json                        who owns epoch 3
epochs/000003.closed.json                 its owner ended cleanly
segments/00000120-000003/rank-00007.*     payload (.safetensors) and part (.json) of one rank
manifests/00000120-000003.json            the commit
proven/00000120-000003.json               resumed from, and a step succeeded
suspect/00000120-000003.json              jobs that resumed from it died repeatedly
LATEST                                    a hint, never trusted
PROBE                                     in object stores: put once; a second put tests If-None-Match"""

import re

from store.names import SaveId

STORE = "STORE.json"
LOCK = "LOCK"
LATEST = "LATEST"
PROBE = "PROBE"
EPOCHS = "epochs"
SEGMENTS = "segments"
MANIFESTS = "manifests"
PROVEN = "proven"
SUSPECT = "suspect"
TOP_LEVEL = frozenset({STORE, LOCK, LATEST, PROBE, EPOCHS, SEGMENTS, MANIFESTS, PROVEN, SUSPECT})
FOREIGN = frozenset({"lost+found"})  # names that a filesystem creates in its own root, which may be the root of a store
_EPOCH_FILE = re.compile(r"(\d{6,9})\.json\Z")
_RANK_FILE = re.compile(r"rank-(\d{5,8})\.(json|safetensors)\Z")


def epoch_path(epoch: int) -> str:
    """Return the path of an epoch's record."""
    return f"{EPOCHS}/{epoch:06d}.json"


def closed_path(epoch: int) -> str:
    """Return the path of the mark that an epoch's owner ended cleanly."""
    return f"{EPOCHS}/{epoch:06d}.closed.json"


def parse_epoch(name: str) -> int | None:
    """Return the epoch of a file name in ``epochs/``, None for other names."""
    match = _EPOCH_FILE.match(name)
    return int(match[1]) if match and f"{int(match[1]):06d}.json" == name else None


def segment_dir(save: SaveId) -> str:
    """Return the directory of a segment group: all ranks' segments of one save."""
    return f"{SEGMENTS}/{save.name}"


def part_path(save: SaveId, rank: int) -> str:
    """Return the path of a rank's part."""
    return f"{segment_dir(save)}/rank-{rank:05d}.json"


def payload_path(save: SaveId, rank: int) -> str:
    """Return the path of a rank's payload."""
    return f"{segment_dir(save)}/rank-{rank:05d}.safetensors"


def parse_rank_file(name: str) -> tuple[int, str] | None:
    """Return (rank, suffix) of a file name in a segment directory, None for other names."""
    match = _RANK_FILE.match(name)
    if match is None or name != f"rank-{int(match[1]):05d}.{match[2]}":
        return None
    return int(match[1]), match[2]


def manifest_path(save: SaveId) -> str:
    """Return the path of a manifest."""
    return f"{MANIFESTS}/{save.name}.json"


def proven_path(save: SaveId) -> str:
    """Return the path of the mark that a manifest was resumed from."""
    return f"{PROVEN}/{save.name}.json"


def suspect_path(save: SaveId) -> str:
    """Return the path of the mark that jobs died after resuming from a manifest."""
    return f"{SUSPECT}/{save.name}.json"


def parse_save_file(name: str) -> SaveId | None:
    """Return the save of a file name in ``manifests/``, ``proven/`` or ``suspect/``, None for other names."""
    stem, dot, suffix = name.rpartition(".")
    return parse_save_dir(stem) if dot and suffix == "json" else None


def parse_save_dir(name: str) -> SaveId | None:
    """Return the save of a directory name in ``segments/``, None for other names."""
    try:
        return SaveId.parse(name)
    except ValueError:
        return None
