"""Weights as Hugging Face transformers loads them: safetensors, an index where there are several, and the folder's
configuration and tokenizer.

``from_pretrained`` takes the folder, with nothing of ours installed. No optimizer, no run state.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from merger.checkpoint import SLOT_OF_KIND, Checkpoint
from merger.containers.base import OutFile
from merger.containers.safetensors import SafetensorsFile
from merger.containers.verbatim import Verbatim
from merger.layouts.base import Laid
from merger.layouts.hf_certificate import dtype_notes, weights_certificate
from merger.layouts.hf_files import model_files, read_config, require_folder, weight_names
from merger.layouts.names import model_names
from merger.stored import Stored, whole
from merger.target import Target
from merger.tensors import torch_dtype
from store.errors import UnsupportedError, UsageError
from store.text import listed

_METADATA = {"format": "pt"}
_ADAPTER = "base_model.model."


class HfLayout:
    """A model folder."""

    def lay_out(self, checkpoint: Checkpoint, target: Target) -> Laid:
        """See :class:`merger.layouts.base.Layout`."""
        _refuse_left_out(checkpoint)
        weights = hf_weights(checkpoint, target)
        files = [*weight_files(weights, target.file_bytes)]
        if checkpoint.files is not None:
            require_folder(checkpoint.files)
            files += model_files(checkpoint.files, weights_dtype(weights))
        certificate = weights_certificate(checkpoint, weights)
        notes = (*dtype_notes(certificate), *_notes(checkpoint, weights))
        return Laid(f"step{checkpoint.step}", tuple(files), (_load(checkpoint),), notes, certificate)


def hf_weights(checkpoint: Checkpoint, target: Target) -> dict[str, Stored]:
    """Every tensor of the state dict by name, in ``target.dtype`` or in the one that was trained in.

    Tied tensors under one name where transformers ties them again, else under each name, so that nothing is missing.
    An export must not have infinities that the weights had not; beside a training state they are as the run had them.
    """
    asked = None if target.dtype is None else torch_dtype(target.dtype)
    if asked is not None and not asked.is_floating_point:
        raise UsageError(f"weights cannot be written as {target.dtype}: name a floating-point dtype, such as BF16")
    out: dict[str, Stored] = {}
    for name, fqn in _kept(checkpoint).items():
        record = checkpoint.record(fqn)
        dtype = torch_dtype(record.dtype)
        if asked is not None and dtype.is_floating_point and record.kind != "buffer":
            dtype = asked
        # A working weight is its fp32 master cast to the working dtype, bit for bit.
        stored = whole(checkpoint, fqn, SLOT_OF_KIND[record.kind], dtype)
        out[name] = replace(stored, stays_finite=target.layout == "hf")
    return out


def _refuse_left_out(checkpoint: Checkpoint) -> None:
    left_out = checkpoint.facts.get("frozen_left_out")
    known = weight_names(checkpoint.files)
    if left_out and not (known and known <= model_names(checkpoint).keys()):
        raise UnsupportedError(
            f"{checkpoint.origin} was saved without its frozen parameters ({listed(left_out, 6)}): transformers would "
            "make them up of random numbers. Save it without exclude_frozen_parameters; if none are frozen, name the "
            "folder of the model (--files), whose weights say which names there are"
        )


def weight_files(weights: Mapping[str, Stored], shard_bytes: int) -> list[OutFile]:
    """``model.safetensors``, or numbered ones of about ``shard_bytes`` each with an index."""
    shards: list[dict[str, Stored]] = [{}]
    size = 0
    for name, stored in weights.items():
        if shards[-1] and size + stored.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = stored
        size += stored.nbytes
    if len(shards) == 1:
        return [OutFile("model.safetensors", SafetensorsFile(shards[0], _METADATA))]
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    files = [OutFile(name, SafetensorsFile(shard, _METADATA)) for name, shard in zip(names, shards, strict=True)]
    return [*files, OutFile("model.safetensors.index.json", Verbatim(_index(names, shards)))]


def weights_dtype(weights: Mapping[str, Stored]) -> str | None:
    """Torch's name of the floating-point dtype that most elements have: what ``config.json`` should say."""
    numels: Counter[str] = Counter()
    for stored in weights.values():
        if stored.dtype.is_floating_point:
            numels[str(stored.dtype).removeprefix("torch.")] += stored.numel
    return numels.most_common(1)[0][0] if numels else None


def _kept(checkpoint: Checkpoint) -> dict[str, str]:
    """Canonical fqn by name, further names of tied tensors left out where transformers leaves them out."""
    names = model_names(checkpoint)
    first: dict[str, str] = {}
    for name, fqn in names.items():
        first.setdefault(fqn, name)
    vocabulary = _tied_vocabulary(read_config(checkpoint.files) or {})
    if vocabulary is not None:
        return {
            name: fqn
            for name, fqn in names.items()
            if first[fqn] == name or checkpoint.record(fqn).shape[:1] != (vocabulary,)
        }
    known = weight_names(checkpoint.files)
    if known.issuperset(first.values()):
        # What transformers itself wrote for this model says which names it needs.
        return {name: fqn for name, fqn in names.items() if name in known}
    return names


def _tied_vocabulary(config: Mapping[str, object]) -> object:
    """The vocabulary's size, if transformers ties embeddings and head of a model with this configuration by itself.

    None where that is not said outright: the default differs from model to model, and a head that is written
    twice costs space, while one that is missing is made up of random numbers.
    """
    text = config.get("text_config")
    inner: Mapping[str, object] = text if isinstance(text, dict) else {}
    said = {one["tie_word_embeddings"] for one in (config, inner) if "tie_word_embeddings" in one}
    return config.get("vocab_size", inner.get("vocab_size")) if said == {True} else None


def _index(names: Sequence[str], shards: Sequence[Mapping[str, Stored]]) -> bytes:
    every = [stored for shard in shards for stored in shard.values()]
    metadata = {
        "total_parameters": sum(stored.numel for stored in every),
        "total_size": sum(stored.nbytes for stored in every),
    }
    table = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    return (json.dumps({"metadata": metadata, "weight_map": table}, indent=2, sort_keys=True) + "\n").encode()


def _load(checkpoint: Checkpoint) -> str:
    config = read_config(checkpoint.files)
    if config is None:
        return (
            "for part in pathlib.Path({out!r}).glob('*.safetensors'): "
            "model.load_state_dict(safetensors.torch.load_file(part), strict=False)"
        )
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else "AutoModelForCausalLM"
    return f"model = transformers.{architecture}.from_pretrained({{out!r}}, dtype='auto')"


def _notes(checkpoint: Checkpoint, weights: Mapping[str, Stored]) -> tuple[str, ...]:
    notes = []
    if read_config(checkpoint.files) is None:
        notes.append(
            "there is no config.json: transformers cannot load the folder by itself; name the folder of the model "
            "that was trained (--files), or put its config.json beside the weights"
        )
    if any(name.startswith(_ADAPTER) for name in weights):
        notes.append(
            "the weights are those of a model wrapped by peft, base and adapters together, under peft's names: build "
            "the same peft model and load them into it with load_state_dict"
        )
    return tuple(notes)
