"""Places: what names a bucket, what a directory, and what neither."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from store.errors import ConfigError
from store.location import ObjectUrl, files_at, is_url, place_of, store_place
from store.storage.local import LocalFiles


@pytest.mark.parametrize("given", ["s3://bucket/a/b", "s3://bucket/a/b/", "S3://bucket/a/b", Path("s3://bucket/a/b")])
def test_a_url_is_one_however_it_came(given: str | Path) -> None:
    place = place_of(given)
    assert isinstance(place, ObjectUrl)
    assert str(place) == f"{place}" == os.fspath(place) == "s3://bucket/a/b"
    assert (place.bucket, place.prefix, place.name) == ("bucket", "a/b", "b")
    assert place.absolute() is place.resolve() is place.expanduser() is place_of(place) is place
    assert store_place(given) == place


def test_a_whole_bucket_is_a_place() -> None:
    place = place_of("s3://bucket")
    assert isinstance(place, ObjectUrl)
    assert (str(place), place.bucket, place.prefix) == ("s3://bucket", "bucket", "")


def test_no_file_of_this_machine_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s3:" / "bucket" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    place = place_of("s3://bucket/a")
    assert not place.exists()
    assert not place.is_dir()
    assert not (place / "LOCK").is_file()
    assert str(place / "LOCK") == "s3://bucket/a/LOCK"
    assert not is_url(place_of(tmp_path / "s3:" / "bucket" / "a")), "an absolute path is one"


@pytest.mark.parametrize("given", ["checkpoints", "./a/b", "/abs", "~/x", "a:b", "C:", "a/s3://b"])
def test_a_path_stays_as_it_is(given: str) -> None:
    assert str(place_of(given)) == str(Path(given))
    assert isinstance(files_at(given), LocalFiles)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("gcs://bucket/a", "gcs:// is not supported; use a directory, s3://"),
        ("gs://", "gs://BUCKET/PREFIX"),
        ("az://", "az://BUCKET/PREFIX"),
        ("https://host/bucket", "https:// is not supported"),
        ("s3://", "names no bucket"),
        ("s3://b_/x", "names no bucket"),
        ("s3://bucket/a//b", "single slashes"),
        ("s3://bucket/../other", "single slashes"),
        ("s3://bucket/a b", "single slashes"),
        ("s3://bucket/a?versionId=1", "single slashes"),
    ],
)
def test_what_is_no_place_is_refused_by_name(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        place_of(given)


BARRED = """
import sys
sys.modules["obstore"] = None
from store.location import files_at
import monitor
files_at("checkpoints")
try:
    files_at("s3://bucket/a")
except Exception as error:
    print(type(error).__name__, error)
"""


def test_without_the_library_there_is_one_line_that_says_what_to_type() -> None:
    """And nothing needs it before a bucket is named."""
    done = subprocess.run([sys.executable, "-c", BARRED], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("UnsupportedError object stores need obstore")
    assert "pip install 'driftpoint[s3]'" in done.stdout
    assert done.stdout.count("\n") == 1
