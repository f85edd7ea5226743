"""``driftpoint export``: the hub's own client pushes to a small hub, and transformers loads what is there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from store.errors import StorageError
from tests.support.cli import driftpoint, environment
from tests.support.hub import Hub
from tests.support.plain_stores import PlainStore

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")

TRAIN = """
import sys, threading
import torch
import monitor
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2))
model.config.save_pretrained(sys.argv[2])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
keep = {"keep_last": 1, "log_spaced": False, "weights_every": 2}
settings = {"store": sys.argv[1], "every": 1, "metrics": {"enabled": False}, "retention": keep}
with monitor.attach((model, optimizer), settings) as checkpointer:
    for step in range(checkpointer.resume(), 5):
        tokens = torch.randint(0, 32, (2, 8))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step()
        checkpointer.flush()
        for thread in threading.enumerate():
            if thread.name.startswith("driftpoint-weights-"):
                thread.join()
        torch.save(model.state_dict(), f"{sys.argv[2]}/{step + 1}.pt")
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(tmp_path / "hub") as made:
        for name, value in made.environment.items():
            monkeypatch.setenv(name, value)
        yield made


def test_the_weights_of_an_old_commit_are_pushed_and_loaded(hub: Hub, tmp_path: Path) -> None:
    store, model = tmp_path / "store", tmp_path / "model"
    model.mkdir()
    subprocess.run([sys.executable, "-c", TRAIN, store, model], env=environment(), check=True)
    (model / "README.md").write_text("---\nlicense: mit\n---\n# Tiny\n")
    assert (store / "weights" / "00000002-000001").is_dir()
    assert not (store / "manifests" / "00000002-000001.json").exists()
    answer = driftpoint("export", store, "me/tiny", "--step", 2, "--files", model, "--private", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["out"].startswith(hub.endpoint) and answer.json["certificate"]["exact"]
    folder = hub.folder("me/tiny")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    wanted = torch.load(model / "2.pt", weights_only=True)
    assert loaded.keys() == wanted.keys()
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)
    assert hub.private == {"me/tiny": True}
    assert hub.commits == [("me/tiny", "main", "00000002-000001, step 2: exact")]
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n\n> Commit 00000002-000001, step 2: exact.")
    assert card.endswith("# Tiny\n")
    assert json.loads((folder / "driftpoint-certificate.json").read_text())["save"] == "00000002-000001"


def test_a_composite_is_labelled_and_replaces_what_was_pushed_in_other_files(hub: Hub, tmp_path: Path) -> None:
    store = PlainStore(tmp_path / "store")
    store.save(10)
    store.save(20, layers=["layers.1"], drift=0.0125)
    assert driftpoint("export", store.root, "me/mixed", "--step", 10, "--revision", "dev").code == 0
    old = hub.folder("me/mixed", "dev") / "model-00001-of-00002.safetensors"
    old.write_bytes(b"old")
    (old.parent / "model.safetensors.index.json").write_text("{}")
    answer = driftpoint("export", store.root, "me/mixed", "--revision", "dev")
    assert answer.code == 0, answer.err
    assert "composite" in answer.out and "there is no config.json" in " ".join(answer.out.split())
    names = sorted(path.name for path in old.parent.iterdir())
    assert names == ["README.md", "driftpoint-certificate.json", "model.safetensors"]
    card = (old.parent / "README.md").read_text()
    assert "step 20: composite: layers up to 10 steps old, drift up to 0.0125" in card
    assert hub.commits[-1][2] in card and "composite" in hub.commits[-1][2]
    assert not any(hub.folder("me/mixed").iterdir()), "main was not pushed to"


def test_what_the_hub_refuses_is_one_line(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PlainStore(tmp_path / "store")
    store.save(10)
    answer = driftpoint("export", store.root, "me/a model")
    assert (answer.code, answer.out) == (StorageError.exit_code, "") and "me/a model was not pushed" in answer.err
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    answer = driftpoint("export", store.root, "me/none")
    assert answer.code == StorageError.exit_code and "hf auth whoami" in answer.err
    assert hub.private == {} and hub.commits == [], "no repository was made"
