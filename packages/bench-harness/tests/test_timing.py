import itertools
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from bench_harness.timing import (
    Samples,
    in_turns,
    measure,
    narrow,
    record_sample,
    timer_overhead_ms,
)

CPU = torch.device("cpu")


def test_every_sample_is_kept_and_warm_up_is_not():
    calls = []
    samples = measure(lambda: calls.append(None), device=CPU, warmup=3, samples=4, calls=2)
    assert len(calls) == 3 + 4 * 2
    assert len(samples.wall_ms) == 4
    assert samples.device_ms == []
    assert samples.first_ms is not None
    assert samples.row().keys() == {"samples_ms", "first_ms"}


def test_without_warm_up_there_is_no_separate_first_call():
    samples = measure(lambda: None, device=CPU, warmup=0, samples=2)
    assert samples.first_ms is None
    assert samples.row().keys() == {"samples_ms"}


def test_time_is_per_call():
    begin = time.perf_counter()
    samples = measure(lambda: time.sleep(0.01), device=CPU, warmup=0, samples=2, calls=3)
    passed_ms = (time.perf_counter() - begin) * 1e3
    assert min(samples.wall_ms) >= 9.9
    assert 3 * sum(samples.wall_ms) <= passed_ms


def test_a_step_that_raises_adds_no_sample():
    samples = Samples()
    with pytest.raises(RuntimeError, match="boom"), record_sample(samples, CPU):
        raise RuntimeError("boom")
    assert samples.wall_ms == []


@pytest.mark.parametrize("bad", [{"warmup": -1}, {"samples": 0}, {"calls": 0}])
def test_counts_out_of_range_are_named(bad):
    (name,) = bad
    with pytest.raises(ValueError, match=f"{name} must be at least"):
        measure(lambda: None, device=CPU, **({"warmup": 0, "samples": 1} | bad))


def test_the_timer_itself_costs_microseconds():
    assert 0 <= timer_overhead_ms(CPU) < 1.0


@pytest.mark.gpu
def test_device_events_agree_with_the_wall_clock():
    device = torch.device("cuda")
    matrix = torch.randn(4096, 4096, device=device)
    samples = measure(lambda: matrix @ matrix, device=device, warmup=3, samples=5, calls=5)
    assert len(samples.device_ms) == 5
    for wall, on_device in zip(samples.wall_ms, samples.device_ms, strict=True):
        assert 0.5 * wall < on_device <= wall


def test_sampling_goes_on_until_the_interval_is_narrow_or_the_time_is_up(
    monkeypatch,
):
    now = [0.0]
    monkeypatch.setattr("bench_harness.timing.time.monotonic", lambda: now[0])
    wide, narrow_one = [10.0, 12.0, 8.0, 11.0], [10.0, 10.05, 9.95, 10.0, 10.02]
    assert narrow(narrow_one, 0.02)
    assert not narrow(wide, 0.02)
    assert not narrow([10.0, 10.0], 0.02), "two samples have no interval"
    samples = [narrow_one, []]
    sampling = {"interval": 2.0, "max_seconds": 10.0}
    assert len(list(in_turns(list, sampling, lambda: samples))) == 1
    samples[1] = wide
    rounds = in_turns(lambda: "ab", sampling, lambda: samples, least=2, parts=2)
    orders = [next(rounds) for _ in range(4)]
    assert orders == [(0, ["a", "b"]), (1, ["b", "a"]), (2, ["a", "b"]), (3, ["b", "a"])]
    now[0] = 5.0
    assert not list(rounds), "each of two parts has half of the time"
    assert len(list(in_turns(list, {}, lambda: [wide]))) == 1, "without options, the least number"
    stops = iter([False, False, True])
    turns = in_turns(list, {}, lambda: [wide], agreed=lambda mine: mine and next(stops))
    assert len(list(turns)) == 3, "others decide"


def test_no_case_imports_scipy_between_its_samples():
    """It would take longer than many cases, within the seconds in which they may go on sampling."""
    program = (
        "import sys; from bench_harness.timing import narrow\n"
        "narrow([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6], 0.02); sys.exit('scipy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_phases_are_sampled_until_they_are_enough_but_a_cold_start_once(monkeypatch):
    from bench_harness.experiments.model import measure_phases
    from bench_harness.training import settings

    shape = {"d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    config = {"size": "custom", **shape, "batch": 1, "sequence": 4, "modes": ["step"]}
    config |= {"samples": 2, "interval": 1e-9, "max_seconds": 3.0}
    seconds = itertools.count()  # a clock that only questions move
    clock = {"monotonic": seconds.__next__, "perf_counter_ns": time.perf_counter_ns}
    monkeypatch.setattr("bench_harness.timing.time", SimpleNamespace(**clock))
    variants = {"plain": settings.Settings()}
    for warmup, turns in ((0, 1), (1, None)):
        taken = measure_phases(
            variants, {**config, "warmup": warmup}, torch.device("cpu"), lambda text: None
        )
        counts = {len(samples.wall_ms) for samples in taken["plain"].values()}
        assert len(counts) == 1
        (count,) = counts
        assert count == 2 * turns if turns else count > 2
        assert all(samples.first_ms > 0 for samples in taken["plain"].values())
