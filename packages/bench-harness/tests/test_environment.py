import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from bench_harness import environment


def test_description_is_json_and_needs_no_torch():
    program = (
        "import json, sys; from bench_harness import environment as e; "
        "print(json.dumps([e.describe(), e.snapshot(), e.gpu_count(), e.resolve_device('auto')])); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    described, state, gpus, device = json.loads(done.stdout)
    assert described["packages"]["torch"] == environment.package_version("torch")
    assert described["cpu_threads"] >= 1
    assert len(described["gpus"]) >= gpus
    assert len(state["gpus"]) == len(described["gpus"])
    assert device == ("cuda" if gpus else "cpu")


def test_runs_with_other_numbers_of_threads_have_other_environments(monkeypatch):
    found = set()
    for threads in ("1", "2", "2,1", None):
        if threads is None:
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
            monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
        else:
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
        described = environment.describe()
        found.add((described["torch_threads"], environment.fingerprint(described)))
    assert {threads for threads, _ in found} == {1, 2, "default"}
    assert len({identity for _, identity in found}) == 3


def test_our_own_version_is_known_even_from_the_source_tree(monkeypatch):
    installed = environment.package_version("bench-harness")

    def absent(name):
        raise environment.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(environment.importlib.metadata, "version", absent)
    assert environment.package_version("bench-harness") is not None
    assert installed in (None, environment.package_version("bench-harness"))
    assert environment.package_version("no-such-package") is None
    assert environment.package_version("json") is None


def test_torch_describes_itself():
    import torch

    described = environment.describe_torch()
    assert described["torch"] == torch.__version__
    json.dumps(described)


def test_visible_devices_limit_the_count(monkeypatch):
    from contextlib import contextmanager

    class Library:
        @staticmethod
        def nvmlDeviceGetCount():  # noqa: N802 - the library's own name
            return 4

    @contextmanager
    def present():
        yield Library

    monkeypatch.setattr(environment, "_nvml", present)
    for visible, count in (("0,2", 2), ("", 0), ("-1", 0), ("0,1,2,3,4", 4)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert environment.gpu_count() == count
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert environment.gpu_count() == 4
    assert environment.resolve_device("auto") == "cuda"


class Driver:
    """A driver's library with one GPU, whose power cannot be read."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    class NVMLError(Exception):
        pass

    def __init__(self, present=True):
        self.opened, self.present, self.clock = 0, present, 1980

    def nvmlInit(self):  # noqa: N802 - the library's own names
        self.opened += 1
        if not self.present:
            raise self.NVMLError

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        return uuid

    def nvmlDeviceGetClockInfo(self, handle, kind):  # noqa: N802
        return self.clock

    def nvmlDeviceGetTemperature(self, handle, kind):  # noqa: N802
        return 61

    def nvmlDeviceGetPowerUsage(self, handle):  # noqa: N802
        raise self.NVMLError


def test_each_sample_has_the_gpu_s_clock_where_the_driver_tells_it(monkeypatch):
    import torch

    from bench_harness.timing import Samples, record_sample

    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid="with a clock")
    )
    samples, gpu = Samples(), torch.device("cuda", 0)
    for driver.clock in (1980, 1200):
        samples.wall_ms.append(1.0)
        samples.note_gpu(gpu)
    other = Samples(wall_ms=[1.0, 2.0])
    other.note_gpu(gpu, 2)
    samples.extend(other)
    row = samples.row()
    assert row["samples_sm_clock_mhz"] == [1980.0, 1200.0, 1200.0, 1200.0]
    assert row["samples_temperature_c"] == [61.0] * 4
    assert "samples_power_w" not in row, "this board does not tell it"
    assert driver.opened == 1, "opening the driver takes longer than a step"
    with record_sample(plain := Samples(), torch.device("cpu")):
        pass
    assert plain.row().keys() == {"samples_ms"}


def test_without_a_driver_nothing_is_read(monkeypatch):
    import torch

    assert environment.gpu_now(torch.device("cpu")) == {}
    monkeypatch.setitem(sys.modules, "pynvml", Driver(present=False))
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid="no driver")
    )
    assert environment.gpu_now(torch.device("cuda", 0)) == {}


def test_unknown_device_lists_those_there_are():
    with pytest.raises(ValueError, match="auto, cpu, cuda, but got 'tpu'"):
        environment.resolve_device("tpu")


def test_throttling_in_either_snapshot_is_reported():
    calm, hot = {"gpus": [{"throttle_reasons": []}]}, {"gpus": [{"throttle_reasons": ["power"]}]}
    assert environment.throttled(calm, hot) == ["power"]
    assert environment.throttled(calm, {"gpus": []}) == []


def test_outside_a_repository_there_is_no_commit(tmp_path):
    assert environment.git_state(tmp_path) is None


def test_a_changed_file_makes_the_tree_dirty(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, timeout=120)

    git("init", "--quiet")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "--quiet", "-m", "first")
    state = environment.git_state(tmp_path)
    assert state["dirty"] is False
    assert len(state["commit"]) == 40
    (tmp_path / "file").write_text("two")
    assert environment.git_state(tmp_path)["dirty"] is True


@pytest.mark.gpu
def test_gpus_are_described():
    described = environment.describe()
    assert described["driver"]
    assert described["gpus"][0]["memory_gib"] > 1
    assert environment.snapshot()["gpus"][0]["sm_clock_mhz"] > 0
