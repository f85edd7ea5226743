"""What a checkpoint of DeepSpeed seems to lack, by names alone: ``exclude_frozen_parameters`` leaves no list behind.

Pure. No name tells of a frozen parameter that every block lacks, or of one outside the blocks. Numbers that a list of
single modules leaves out may be modules without parameters, such as activations: both leave the same names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from merger.layers import layers_of

_ADAPTER = "lora_"


def left_out(shapes: Mapping[str, Sequence[int]], dangling: Mapping[str, str]) -> tuple[str, ...]:
    """Parameters that are missing, or patterns of them, for messages.

    shapes: of all parameters and buffers that are there. dangling: of tied parameters that are not, by the further
    names that they are tied under. Found are these, numbers left out between the model's blocks, and what adapters
    adapt.
    """
    found = dict.fromkeys(dangling.values())
    found |= dict.fromkeys(_gaps(shapes))
    if shapes and all(_ADAPTER in name for name in shapes):
        found["all but the adapters"] = None
    return tuple(found)


def _gaps(shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Blocks whose number is left out. Single modules count for blocks only where nothing larger is one."""
    numbers: dict[bool, dict[str, set[int]]] = {True: {}, False: {}}
    for layer in layers_of(shapes):
        parent, _, number = layer.name.rpartition(".")
        if layer.block and number.isdecimal():
            large = any("." in fqn[len(layer.name) + 1 :] for fqn in layer.fqns)
            numbers[large].setdefault(parent, set()).add(int(number))
    return [
        f"{parent}.{number}.*"
        for parent, there in (numbers[True] or numbers[False]).items()
        for number in range(max(there))
        if number not in there
    ]
