"""What a source without a record of drift can certify: everything of one step, as it was.

Pure: from tensors and where their values lie to layers, records and a certificate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from merger.blocks import Extent
from merger.checkpoint import SLOT_OF_KIND
from merger.layers import layers_of
from merger.tensors import torch_dtype
from store.certificate import Certificate, CertifiedUnit
from store.coverage import FragmentIndex
from store.names import RAW
from store.schema import LayerRecord, TensorRecord


@dataclass(frozen=True)
class NamedTensor:
    """A parameter or buffer. dtype: of the working copy, as safetensors names it. kind: as in TensorRecord."""

    shape: tuple[int, ...]
    dtype: str
    kind: str
    aliases: tuple[str, ...] = ()


def described(tensors: Mapping[str, NamedTensor]) -> tuple[dict[str, TensorRecord], tuple[LayerRecord, ...]]:
    """Records of all tensors, in the order given, and of the layers that their names make."""
    layers = layers_of({fqn: tensor.shape for fqn, tensor in tensors.items()})
    home = {fqn: layer.name for layer in layers for fqn in layer.fqns}
    records = {
        fqn: TensorRecord(
            layer=home[fqn], shape=tensor.shape, dtype=tensor.dtype, kind=tensor.kind, aliases=tensor.aliases
        )
        for fqn, tensor in tensors.items()
    }
    return records, tuple(LayerRecord(name=layer.name, block=layer.block) for layer in layers)


def certificate(
    save: str,
    step: int,
    source: str,
    tensors: Mapping[str, TensorRecord],
    index: FragmentIndex[Extent],
    *,
    problems: Iterable[str] = (),
    exact: bool = True,
) -> Certificate:
    """Every (layer, slot) is of ``step``, and is stored as it was. source: its path, for people.

    exact: False where a problem leaves that in doubt, or where something is missing.
    """
    nbytes: dict[tuple[str, str], int] = {}
    numel: dict[tuple[str, str], int] = {}
    for (fqn, slot), extents in index.names().items():
        unit = (tensors[fqn].layer, slot)
        numel[unit] = numel.get(unit, 0) + sum(extent.stop - extent.start for extent in extents)
        nbytes[unit] = nbytes.get(unit, 0) + sum(
            (extent.stop - extent.start) * torch_dtype(extent.dtype).itemsize for extent in extents
        )
    still = {SLOT_OF_KIND["frozen"], SLOT_OF_KIND["buffer"]}
    order = {layer: i for i, layer in enumerate(dict.fromkeys(tensor.layer for tensor in tensors.values()))}
    units = tuple(
        CertifiedUnit(
            layer=layer,
            slot=slot,
            step=step,
            save=save,
            staleness=0,
            encoding=RAW,
            drift=0.0,
            moving=slot not in still,
            fallback=False,
            nbytes=nbytes[layer, slot],
            source=source,
            numel=numel[layer, slot],
        )
        for layer, slot in sorted(nbytes, key=lambda unit: (order[unit[0]], unit[1]))
    )
    return Certificate("", save, step, exact, units, tuple(problems))
