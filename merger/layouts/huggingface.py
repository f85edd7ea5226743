"""Write weights as Hugging Face transformers loads them: safetensors, an index, configuration and tokenizer.

``from_pretrained`` takes the folder, without Driftpoint installed; it has no optimizer and no run state. The small
files of the run's model folder are copied as they are, except that ``config.json`` names the weights' dtype. A rounding
cast makes weights less than exact, by an unknown amount; a cast to the trained dtype gives the working weights."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from merger.checkpoint import SLOT_OF_KIND, Checkpoint, PlannedTensor, plan_parameter
from merger.io.output_file import OutFile, VerbatimFile
from merger.layouts.base import LayoutResult, Target, grouped, model_names, require_folder
from merger.tensors import torch_dtype
from merger.writers.safetensors import SafetensorsFile
from store.certificate import Certificate, CertifiedUnit, is_exact, is_lossy
from store.errors import MergeError, UnsupportedError, UsageError
from store.text import listed

_NAMED = 6  # most layers that a note names
CONFIG = "config.json"
_LARGEST = 1 << 28  # largest file that is copied, in bytes; tokenizers have a few tens of megabytes
_SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py", ".bpe", ".vocab", ".spm", ".md")
_NAMES = frozenset({"LICENSE", "NOTICE"})
_FOLDERS = ("chat_templates", "additional_chat_templates")

_TRAINING_FILES = frozenset({
    "trainer_state.json", "all_results.json", "train_results.json", "eval_results.json",
    "driftpoint-certificate.json", "zero_to_fp32.py", "zero_to_torch.py",
})  # fmt: skip
"""Files of a training run, not of a model."""

_METADATA = {"format": "pt"}
_ADAPTER = "base_model.model."


def hf_layout(checkpoint: Checkpoint, target: Target) -> LayoutResult:
    """Plan a model folder."""
    left_out = checkpoint.facts.get("frozen_left_out")
    known = weight_names(checkpoint.files)
    if left_out and not (known and known <= model_names(checkpoint).keys()):
        raise UnsupportedError(
            f"{checkpoint.origin} was saved without its frozen parameters ({listed(left_out, 6)}), which transformers "
            "would initialize randomly. Save it without exclude_frozen_parameters; if none are frozen, name the folder "
            "of the model (--files), whose weights list all names"
        )
    weights = hf_weights(checkpoint, target)
    files = [*weight_files(weights, target.file_bytes)]
    if checkpoint.files is not None:
        files += model_files(checkpoint.files, weights_dtype(weights))
    certificate = weights_certificate(checkpoint, weights)
    notes = (*_dtype_notes(certificate), *_notes(checkpoint, weights))
    return LayoutResult(f"step{checkpoint.step}", tuple(files), (_load(checkpoint),), notes, certificate)


def hf_weights(checkpoint: Checkpoint, target: Target) -> dict[str, PlannedTensor]:
    """Plan every tensor of the state dict by name, in ``target.dtype`` or in the trained dtype.

    Tied tensors have one name if transformers ties them again, else each of their names. An export fails if a finite
    weight would become infinite; beside a training state the weights are as the run had them."""
    requested = None if target.dtype is None else torch_dtype(target.dtype)
    if requested is not None and not requested.is_floating_point:
        raise UsageError(f"weights cannot be written as {target.dtype}; name a floating-point dtype, such as BF16")
    out: dict[str, PlannedTensor] = {}
    for name, fqn in _exported_names(checkpoint).items():
        record = checkpoint.record(fqn)
        dtype = torch_dtype(record.dtype)
        if requested is not None and dtype.is_floating_point and record.kind != "buffer":
            dtype = requested
        # A working weight is its fp32 master cast to the working dtype, bit for bit.
        out[name] = replace(plan_parameter(checkpoint, fqn, dtype), stays_finite=target.layout == "hf")
    return out


def _exported_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the canonical fqn by name, without names that transformers ties itself."""
    names = model_names(checkpoint)
    first: dict[str, str] = {}
    for name, fqn in names.items():
        first.setdefault(fqn, name)
    if (vocabulary := _tied_vocabulary(read_config(checkpoint.files) or {})) is not None:
        return {
            name: fqn
            for name, fqn in names.items()
            if first[fqn] == name or checkpoint.record(fqn).shape[:1] != (vocabulary,)
        }
    known = weight_names(checkpoint.files)
    if known.issuperset(first.values()):
        # The weights that transformers wrote for this model have the names it needs.
        return {name: fqn for name, fqn in names.items() if name in known}
    return names


def _tied_vocabulary(config: Mapping[str, object]) -> object:
    """Return the vocabulary size if the configuration ties embeddings and head explicitly, else None.

    The default differs between models. A head written twice costs space; a missing one is initialized randomly."""
    text = config.get("text_config")
    inner: Mapping[str, object] = text if isinstance(text, dict) else {}
    values = {one["tie_word_embeddings"] for one in (config, inner) if "tie_word_embeddings" in one}
    return config.get("vocab_size", inner.get("vocab_size")) if values == {True} else None


def weight_files(weights: Mapping[str, PlannedTensor], shard_bytes: int) -> list[OutFile]:
    """Return ``model.safetensors``, or numbered files of about ``shard_bytes`` each with an index."""
    shards = [dict(part) for part in grouped(weights.items(), lambda item: item[1].nbytes, shard_bytes)]
    if len(shards) == 1:
        return [OutFile("model.safetensors", SafetensorsFile(shards[0], _METADATA))]
    named = {f"model-{number:05}-of-{len(shards):05}.safetensors": one for number, one in enumerate(shards, start=1)}
    stored = weights.values()
    metadata = {"total_parameters": sum(one.numel for one in stored), "total_size": sum(one.nbytes for one in stored)}
    table = {name: file for file, shard in named.items() for name in shard}
    index = json.dumps({"metadata": metadata, "weight_map": table}, indent=2, sort_keys=True) + "\n"
    files = [OutFile(name, SafetensorsFile(shard, _METADATA)) for name, shard in named.items()]
    return [*files, OutFile("model.safetensors.index.json", VerbatimFile(index.encode()))]


def weights_dtype(weights: Mapping[str, PlannedTensor]) -> str | None:
    """Return torch's name of the floating-point dtype of most elements, for ``config.json``."""
    numels: Counter[str] = Counter()
    for stored in weights.values():
        if stored.dtype.is_floating_point:
            numels[_text(stored.dtype)] += stored.numel
    return numels.most_common(1)[0][0] if numels else None


def _load(checkpoint: Checkpoint) -> str:
    if (config := read_config(checkpoint.files)) is None:
        return (
            "for part in pathlib.Path({out!r}).glob('*.safetensors'): "
            "model.load_state_dict(safetensors.torch.load_file(part), strict=False)"
        )
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else "AutoModelForCausalLM"
    return f"model = transformers.{architecture}.from_pretrained({{out!r}}, dtype='auto')"


def _notes(checkpoint: Checkpoint, weights: Mapping[str, PlannedTensor]) -> Iterator[str]:
    if read_config(checkpoint.files) is None:
        yield (
            "there is no config.json: transformers cannot load the folder by itself; name the folder of the model "
            "that was trained (--files), or put its config.json beside the weights"
        )
    if any(name.startswith(_ADAPTER) for name in weights):
        yield (
            "the weights are those of a model wrapped by peft, base and adapters together, under peft's names: build "
            "the same peft model and load them into it with load_state_dict"
        )


@dataclass(frozen=True)
class WrittenDtype:
    """Weights held in one dtype and written in another that cannot hold all its values."""

    held: str  # torch's name of the dtype in the training state
    written: str  # torch's name of the dtype in the output
    working: bool  # whether ``written`` is the trained dtype: then these are the run's own values, else rounded
    layers: tuple[str, ...]  # layers of these weights


@dataclass(frozen=True)
class WeightsCertificate(Certificate):
    """A certificate of weights alone, with the dtypes that differ from the training state."""

    written: tuple[WrittenDtype, ...] = ()


def weights_certificate(checkpoint: Checkpoint, weights: Mapping[str, PlannedTensor]) -> WeightsCertificate:
    """Return the certificate of an output that holds ``weights`` and no optimizer."""
    layers: dict[tuple[str, str, bool], dict[str, None]] = {}
    rounded: dict[tuple[str, str], str] = {}
    for stored in weights.values():
        for fqn, slot in ((placed.fragment.fqn, placed.fragment.slot) for placed in stored.placed):
            held, record = torch_dtype(checkpoint.dtype(fqn, slot)), checkpoint.record(fqn)
            if not _holds(stored.dtype, held):
                working = stored.dtype == torch_dtype(record.dtype)
                layers.setdefault((_text(held), _text(stored.dtype), working), {})[record.layer] = None
                if not working:
                    rounded[record.layer, slot] = _text(stored.dtype)
    whole = checkpoint.certificate
    units = tuple(unit for unit in whole.units if unit.slot in SLOT_OF_KIND.values())
    written_tensors = {(one.fragment.fqn, one.fragment.slot) for stored in weights.values() for one in stored.placed}
    values = {one.name: getattr(whole, one.name) for one in fields(Certificate)} | {
        "units": tuple(_rounded(unit, rounded.get((unit.layer, unit.slot))) for unit in units),
        "exact": _is_exact(whole, units) and not rounded,
        "as_found": whole.as_found and not rounded,
        "unvouched": len(checkpoint.unvouched & written_tensors),
    }
    return WeightsCertificate(**values, written=tuple(WrittenDtype(*cast, tuple(on)) for cast, on in layers.items()))


def working_dtypes(certificate: Certificate) -> tuple[str, ...]:
    """Return torch's names of the dtypes in which working weights replace master weights."""
    written = certificate.written if isinstance(certificate, WeightsCertificate) else ()
    return tuple(dict.fromkeys(one.written for one in written if one.working))


def _dtype_notes(certificate: WeightsCertificate) -> Iterator[str]:
    for one in certificate.written:
        if one.working:
            live = "" if certificate.lossy else ", which the run computes with"  # others come from rounded masters
            yield (
                f"these are the working weights{live}: its {one.held} master weights rounded "
                f"to {one.written}; --dtype {one.held} writes the master weights themselves"
            )
        else:
            yield (
                f"weights held in {one.held} are written in {one.written}, which rounds them, very small ones to zero: "
                f"this is not exact ({listed(one.layers, _NAMED)}); without a dtype they are written as they were "
                "trained"
            )


def _holds(target: torch.dtype, source: torch.dtype) -> bool:
    if target == source:
        return True
    if not (target.is_floating_point and source.is_floating_point):
        return False
    ours, theirs = torch.finfo(target), torch.finfo(source)
    least = ours.tiny * ours.eps <= theirs.tiny * theirs.eps  # smallest nonzero values
    return ours.eps <= theirs.eps and ours.max >= theirs.max and least


def _is_exact(whole: Certificate, kept: tuple[CertifiedUnit, ...]) -> bool:
    """Return whether the weights are exact, even if optimizer state that is left out is old or rounded.

    Units show this only for a store's commit. Others, composites included, may be inexact for reasons no unit shows."""
    doubtful = whole.as_found or bool(whole.problems)  # a problem of the whole may concern the weights
    of_one_commit = bool(whole.store_id) and not doubtful and len(kept) < len(whole.units)
    return whole.exact or (of_one_commit and bool(kept) and all(is_exact(unit, whole.save) for unit in kept))


def _rounded(unit: CertifiedUnit, dtype: str | None) -> CertifiedUnit:
    if dtype is None:
        return unit
    return replace(unit, encoding=f"{unit.encoding}, {dtype}" if is_lossy(unit.encoding) else dtype, error=None)


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def model_files(files: Path, dtype: str | None) -> list[OutFile]:
    """Return configuration, tokenizer, templates, processors and custom code of a folder.

    ``dtype``: torch's name of the weights' dtype, for ``config.json``; None leaves that file as it is."""
    require_folder(files)
    out = []
    folders = [files, *(files / name for name in _FOLDERS if (files / name).is_dir())]
    for path in (path for folder in folders for path in sorted(folder.iterdir()) if _belongs(path)):
        data = _with_dtype(path, dtype) if path == files / CONFIG and dtype else path.read_bytes()
        out.append(OutFile(path.relative_to(files).as_posix(), VerbatimFile(data)))
    return out


def read_config(files: Path | None) -> Mapping[str, Any] | None:
    """Return ``config.json`` of a folder, None if there is none. MergeError if it is not a JSON object."""
    return None if files is None or not (files / CONFIG).is_file() else read_json(files / CONFIG)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. MergeError if the file does not hold one."""
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise MergeError(f"{path} is not JSON: {error}; restore it, or name another folder") from error
    if not isinstance(found, dict):
        raise MergeError(f"{path} does not hold a JSON object; restore it, or name another folder")
    return found


def weight_names(files: Path | None) -> frozenset[str]:
    """Return the weights in the folder's own safetensors files; empty if none can be read."""
    if files is None:
        return frozenset()
    index, single = files / "model.safetensors.index.json", files / "model.safetensors"
    if index.is_file():
        table = read_json(index).get("weight_map")
        return frozenset(table) if isinstance(table, dict) else frozenset()
    if not single.is_file():
        return frozenset()
    try:
        with safe_open(single, framework="numpy") as found:
            return frozenset(found.keys())
    except SafetensorError:
        return frozenset()


def _belongs(path: Path) -> bool:
    name = path.name
    if name in _TRAINING_FILES or name.endswith(".index.json") or name.startswith("."):
        return False
    return (path.suffix in _SUFFIXES or name in _NAMES) and path.is_file() and path.stat().st_size <= _LARGEST


def _with_dtype(path: Path, dtype: str) -> bytes:
    """Return the configuration with the dtype of the weights, which loaders cast to."""
    config = read_json(path)
    if not _set_dtype(config, dtype):
        # Newer releases of transformers read both names, older ones this one only.
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
