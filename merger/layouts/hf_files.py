"""The small files of a Hugging Face model folder: found in the folder that a run left, taken over as they are.

Only ``config.json`` is touched: it says the dtype that the weights are written in. Weights and training state are
never taken over. It does not know tensors, and imports nothing of Hugging Face.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from merger.containers.base import OutFile
from merger.containers.verbatim import Verbatim
from store.errors import MergeError, UsageError

CONFIG = "config.json"

_LARGEST = 1 << 28
"""Bytes. Tokenizers reach a few tens of megabytes; what is larger is not one of the small files."""

_KINDS = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py", ".bpe", ".vocab", ".spm", ".md")
_NAMES = frozenset({"LICENSE", "NOTICE"})
_FOLDERS = ("chat_templates", "additional_chat_templates")

_NOT_OURS = frozenset(
    {
        "trainer_state.json", "all_results.json", "train_results.json", "eval_results.json",
        "driftpoint-certificate.json", "zero_to_fp32.py", "zero_to_torch.py",
    }
)  # fmt: skip
"""Of a training, not of a model."""


def require_folder(files: Path) -> None:
    """UsageError unless it is a directory."""
    if not files.is_dir():
        raise UsageError(f"{files} is not a directory: name the one that holds config.json and the tokenizer (--files)")


def model_files(files: Path, dtype: str | None) -> list[OutFile]:
    """Configuration, tokenizer, templates, processors, custom code. dtype: torch's name of what the weights are in."""
    require_folder(files)
    found = [path for path in sorted(files.iterdir()) if _belongs(path)]
    for folder in _FOLDERS:
        if (files / folder).is_dir():
            found += [path for path in sorted((files / folder).iterdir()) if _belongs(path)]
    out = []
    for path in found:
        data = _with_dtype(path, dtype) if path == files / CONFIG and dtype else path.read_bytes()
        out.append(OutFile(path.relative_to(files).as_posix(), Verbatim(data)))
    return out


def read_config(files: Path | None) -> Mapping[str, Any] | None:
    """``config.json`` of a folder, None where there is none. MergeError where it is no JSON object."""
    if files is None or not (files / CONFIG).is_file():
        return None
    return read_json(files / CONFIG)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. MergeError where the file holds none."""
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise MergeError(f"{path} is not JSON: {error}; name another folder (--files)") from error
    if not isinstance(found, dict):
        raise MergeError(f"{path} holds no JSON object; name another folder (--files)")
    return found


def weight_names(files: Path | None) -> frozenset[str]:
    """Names of the weights that the folder's own safetensors files hold; empty where it has none that can be read."""
    if files is None:
        return frozenset()
    index, single = files / "model.safetensors.index.json", files / "model.safetensors"
    if index.is_file():
        table = read_json(index).get("weight_map")
        return frozenset(table) if isinstance(table, dict) else frozenset()
    return _header_names(single) if single.is_file() else frozenset()


def _header_names(path: Path) -> frozenset[str]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= path.stat().st_size - 8:
            return frozenset()
        try:
            table = json.loads(file.read(size))
        except ValueError:
            return frozenset()
    return frozenset(table) - {"__metadata__"} if isinstance(table, dict) else frozenset()


def _belongs(path: Path) -> bool:
    name = path.name
    if name in _NOT_OURS or name.endswith(".index.json") or name.startswith("."):
        return False
    return (path.suffix in _KINDS or name in _NAMES) and path.is_file() and path.stat().st_size <= _LARGEST


def _with_dtype(path: Path, dtype: str) -> bytes:
    """The configuration, its dtype being that of the weights: whoever loads them casts them to what it says."""
    config = read_json(path)
    if not _set_dtype(config, dtype):
        # Both are read by every release that knows the newer name; older ones know the older name only.
        config["torch_dtype"] = dtype
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _set_dtype(config: dict[str, Any], dtype: str) -> bool:
    found = False
    for key, value in config.items():
        if key in ("dtype", "torch_dtype"):
            config[key], found = dtype, True
        elif key.endswith("_config") and isinstance(value, dict):
            _set_dtype(value, dtype)
    return found
