"""The run folder: nothing stored is lost, nothing unfinished counts, nothing newer is guessed."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from bench_harness import store as store_module
from bench_harness.store import SCHEMA_VERSION, Store, StoreError


def row(key: str, status: str = "ok", started: str = "t0", **more: object) -> dict[str, object]:
    about = {"experiment": "toy", "label": f"toy {key}", "config": {}, "commit": None}
    ended = {"status": status, "started": started, "seconds": 1.0, "error": None, "detail": None}
    return {"case_key": key, "environment": "e", **about, **ended, **more}


def lines(store: Store) -> list[dict[str, object]]:
    return [json.loads(line) for line in store.results.read_text().splitlines()]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "run")


def test_rows_come_back_as_they_were_stored(store: Store) -> None:
    with store.open_for_writing() as writer:
        writer.append([row("a", samples_ms=[1.5, 2.5]), row("a", samples_ms=[])])
        writer.append([row("b", "oom", error="no room")])
    loaded = store.load()
    assert loaded.damaged == {}
    assert [(r["case_key"], r["status"]) for r in loaded.rows] == [
        ("a", "ok"),
        ("a", "ok"),
        ("b", "oom"),
    ]
    assert loaded.rows[0]["samples_ms"] == [1.5, 2.5]
    assert all(line["schema"] == SCHEMA_VERSION for line in lines(store))


def test_finished_are_results_and_facts_but_not_failures(store: Store) -> None:
    with store.open_for_writing() as writer:
        for status in ("ok", "oom", "skipped", "timeout", "error"):
            writer.append([row(status, status)])
    assert store.finished("e") == {"ok", "oom", "skipped"}
    assert store.finished("another machine") == set()


def test_a_repeated_case_counts_with_its_last_attempt(store: Store) -> None:
    with store.open_for_writing() as writer:
        writer.append([row("a", "error", "t0")])
        writer.append([row("b")])
        writer.append([row("a", "ok", "t1", value=1), row("a", "ok", "t1", value=2)])
    assert [(r["case_key"], r.get("value")) for r in store.load().rows] == [
        ("b", None),
        ("a", 1),
        ("a", 2),
    ]


def test_a_torn_last_line_is_reported_and_its_case_is_unfinished(store: Store) -> None:
    with store.open_for_writing() as writer:
        writer.append([row("a")])
        writer.append([row("b", value=1), row("b", value=2)])
    whole = store.results.read_bytes()
    store.results.write_bytes(whole[:-20])
    loaded = store.load()
    assert loaded.damaged == {3: "it is not a JSON object"}
    assert [r["case_key"] for r in loaded.rows] == ["a"]
    assert store.finished("e") == {"a"}
    with store.open_for_writing() as writer:  # goes on behind the torn line, not inside it
        writer.append([row("b", started="t1", value=1)])
    assert store.finished("e") == {"a", "b"}
    assert list(store.load().damaged) == [3]


@pytest.mark.parametrize("garbage", [b"\x00\x00\x00", b"[1, 2]", b'{"schema": 1}', b"\xff\xfe"])
def test_damage_in_the_middle_takes_nothing_else_along(store: Store, garbage: bytes) -> None:
    with store.open_for_writing() as writer:
        writer.append([row("a")])
        writer.append([row("b")])
    first, second = store.results.read_bytes().splitlines()
    store.results.write_bytes(b"\n".join([first, garbage, second, b""]))
    assert list(store.load().damaged) == [2]
    assert store.finished("e") == {"a", "b"}


def test_rows_of_a_newer_version_are_refused(store: Store) -> None:
    with store.open_for_writing() as writer:
        writer.append([row("a")])
    newer = {"schema": SCHEMA_VERSION + 1, "renamed_key": "b"}
    with store.results.open("a") as file:
        file.write(json.dumps(newer) + "\n")
    with pytest.raises(StoreError, match=r"line 2 must have schema 1 or less, but got 2\. Upgrade"):
        store.load()


def test_two_runs_do_not_write_into_one_folder(store: Store) -> None:
    with (
        store.open_for_writing(),
        pytest.raises(StoreError, match="must be used by one run at a time"),
    ):
        store.open_for_writing().__enter__()
    with store.open_for_writing():
        pass


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "run")
    with pytest.raises(StoreError, match=r"must be a folder to write to, .* \(Not a directory\)"):
        store.open_for_writing().__enter__()


def test_a_file_that_does_not_fit_leaves_the_old_one_and_no_part_of_itself(tmp_path: Path) -> None:
    """Its size is limited, which the system tells as it tells of a full disk."""
    path = tmp_path / "page.html"
    store_module.replace_file(path, "old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(
            StoreError, match=r"page\.html must be writable, but got an error: File"
        ):
            store_module.replace_file(path, "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
    assert path.read_text() == "old"


def test_a_full_disk_keeps_what_was_written(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk:
        """A file that takes half of what it is given, once, and then nothing."""

        def __init__(self, file: object) -> None:
            self.file = file
            self.calls = 0

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def write(self, data: bytes) -> int:
            self.calls += 1
            if self.calls > 1:
                raise OSError(28, "No space left on device")
            return int(self.file.write(data[: len(data) // 2]))  # type: ignore[attr-defined]

    with store.open_for_writing() as writer:
        writer.append([row("a")])
        monkeypatch.setattr(writer, "_file", FullDisk(writer._file))
        with pytest.raises(StoreError, match=r"No space left on device\. What was measured"):
            writer.append([row("b")])
    assert store.finished("e") == {"a"}
    assert list(store.load().damaged) == [2]


def test_a_replaced_file_is_whole_or_old(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"started": "t0", "command": "first"}
    with store.open_for_writing() as writer:
        writer.write_json("run.json", [first])

        def fail(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as full:
            full.setattr(store_module, "open", fail, raising=False)
            with pytest.raises(StoreError, match="No space left"):
                writer.write_json("run.json", [{**first, "command": "second"}])
    assert store.runs() == [first]
    assert store.environments() == {}


def test_a_json_file_that_is_not_json_is_named(store: Store) -> None:
    with store.open_for_writing():
        (store.folder / "env.json").write_text("{")
    with pytest.raises(StoreError, match=r"env\.json"):
        store.environments()


@pytest.mark.parametrize("content", ["3", "[]", '{"abc": 3}', '{"abc": {"gpus": 3}}'])
def test_a_json_file_of_something_else_is_named(store: Store, content: str) -> None:
    with store.open_for_writing():
        (store.folder / "env.json").write_text(content)
        (store.folder / "run.json").write_text('[{"started": 3}]')
    with pytest.raises(StoreError, match=r"env\.json must be a table of machines"):
        store.environments()
    with pytest.raises(StoreError, match=r"run\.json must be a list of invocations"):
        store.runs()


def test_a_doubled_file_is_as_good_as_one(store: Store) -> None:
    with store.open_for_writing() as writer:
        writer.append([row("a", value=1), row("a", value=2)])
        writer.append([row("b")])
    before = store.load()
    store.results.write_bytes(2 * store.results.read_bytes())
    assert store.load() == before
    assert store.finished("e") == {"a", "b"}


def test_a_pipe_in_place_of_a_file_is_not_waited_for(store: Store) -> None:
    store.folder.mkdir()
    os.mkfifo(store.results)
    os.mkfifo(store.folder / "run.json")
    for use in (store.load, store.runs, store.check_is_run, store.open_for_writing().__enter__):
        with pytest.raises(StoreError, match=r"must be a regular file|must be a run folder"):
            use()


def test_escape_sequences_do_not_reach_a_terminal(store: Store) -> None:
    with store.open_for_writing() as writer:
        writer.append([row("a", error="\x1b]0;title\x07 \x9b31m red", detail="one\ntwo")])
    (loaded,) = store.load().rows
    assert loaded["error"] == " ]0;title   31m red"
    assert loaded["detail"] == "one\ntwo"
