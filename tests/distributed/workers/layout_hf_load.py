"""One process, where nothing of driftpoint can be imported: stock transformers loads what was merged.

Usage: layout_hf_load.py FOLDER... — writes ``FOLDER-logits.pt`` beside each and refuses weights that were made up.
"""

from __future__ import annotations

import sys

import barred
import torch
from layout_hf_cases import logits_of
from transformers import AutoModelForCausalLM


def main(folders: list[str]) -> None:
    for folder in folders:
        model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
        torch.save(logits_of(model), f"{folder}-logits.pt")
    barred.require_barred()


if __name__ == "__main__":
    main(sys.argv[1:])
