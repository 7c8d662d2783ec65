import pandas as pd

from bench_harness.display import row_tables


def test_columns_keep_order_names_and_digits():
    rows = pd.DataFrame(
        {"b": [1.23456, float("nan")], "a": ["x", "y"], "n": [3.0, float("nan")], "void": None}
    )
    frame = row_tables.columns(rows, {"a": "name", "b": "time (ms)", "n": "n (count)", "void": "v"})
    assert list(frame.columns) == ["name", "time (ms)", "n (count)"]
    assert frame["time (ms)"].iloc[0] == 1.235
    assert frame["n (count)"].iloc[0] == 3
    assert str(frame["n (count)"].dtype) == "Int64"


def test_a_column_that_is_not_declared_is_named_by_its_key():
    columns = row_tables.Columns()
    assert columns["late_answers_ms"].heading == "late answers (ms)"
    assert columns["median_ms"].heading == "median (ms)"
    assert columns["mfu"].heading == "MFU (%)"
    rows = pd.DataFrame({"held_bytes": [2**30, 3 * 2**29], "why": ["a", "b"]})
    frame = columns.table("Toy", rows, "why held_gib held_mib absent").frame
    assert frame.to_dict("list") == {
        "why": ["a", "b"], "held (GiB)": [1, 1.5], "held (MiB)": [1024, 1536],
    }  # fmt: skip


def test_only_finished_rows_are_measurements():
    rows = pd.DataFrame({"status": ["ok", "oom"], "x": [1, 2]})
    assert list(row_tables.finished(rows)["x"]) == [1]


def test_groups_say_what_tells_them_apart():
    rows = pd.DataFrame({"dtype": ["a", "a", "b"], "width": [1, 2, 1], "same": [0, 0, 0]})
    groups = row_tables.by(rows, ["dtype", "width", "same", "absent"])
    assert [name for name, _ in groups] == ["a, width 1", "a, width 2", "b, width 1"]
    assert row_tables.by(rows, ["same"])[0][0] == ""
