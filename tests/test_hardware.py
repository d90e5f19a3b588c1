"""Peak performance of devices: the table, matching of driver names, and the measurement."""

import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import whet
from whet import hardware
from whet.errors import ConfigError
from whet.hardware import CHIPS, chip_by_driver_name, chip_by_name, driver_name, find_peak, measure_peak


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("Tesla V100-SXM2-16GB", "v100"),
        ("Tesla V100-PCIE-32GB", "v100-pcie"),
        ("Tesla T4", "t4"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GH200 144G HBM3e", "gh200-144gb"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA GeForce RTX 5070 Ti", "rtx5070-ti"),
        ("NVIDIA GeForce RTX 5080", "rtx5080"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("AMD Instinct MI250X", "mi250x"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI300X VF", "mi300x"),
        ("AMD Instinct MI325X", "mi325x"),
        ("AMD Instinct MI355X", "mi355x"),
        ("Apple M1", "m1"),
        ("Apple M2 Pro", "m2-pro"),
        ("Apple M3 Max", "m3-max"),
        ("Apple M4", "m4"),
    ],
)
def test_driver_name_matches_its_chip(reported, name):
    assert chip_by_driver_name(reported).name == name


@pytest.mark.parametrize(
    "reported",
    [
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA GeForce RTX 5080 Laptop GPU",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H20",
        "Tesla V100S-PCIE-32GB",
        "NVIDIA A100X",
        "NVIDIA A10G",
        "NVIDIA L40",
        "Apple M9",
        "x86_64",
    ],
)
def test_unknown_chips_do_not_match(reported):
    assert chip_by_driver_name(reported) is None


def test_table_is_consistent():
    assert len({chip.name for chip in CHIPS}) == len(CHIPS)
    for chip in CHIPS:
        assert 0 < chip.fp32_tflops <= chip.half_tflops
        assert chip.bandwidth_gb_s > 0 < chip.memory_gb
        assert re.search("NVIDIA|AMD|Apple", chip.source)
        assert chip_by_name(chip.name.upper().replace("-", " ")) is chip


def test_unknown_name_suggests_a_similar_one():
    with pytest.raises(ConfigError, match="unknown device 'h10'") as caught:
        chip_by_name("h10")
    assert "h100" in caught.value.hint


def test_cpu_is_measured_once():
    cpu = torch.device("cpu")
    before = torch.get_rng_state()
    peak = find_peak(cpu)
    assert torch.equal(before, torch.get_rng_state())
    assert peak is find_peak(cpu) is measure_peak(cpu)
    assert peak.source == "measured"
    assert 1e-3 < peak.fp32_tflops < 100
    assert 0.1 < peak.bandwidth_gb_s < 10_000
    assert driver_name(cpu)


def test_best_time_is_the_shortest_measurement(monkeypatch):
    """The first call is a warmup; the result is the shortest of the calls within the time budget."""
    now, durations = 0.0, iter([9.0, 3.0, 1.0, 2.0, 0.5])

    def call():
        nonlocal now
        now += next(durations)

    monkeypatch.setattr(hardware.time, "perf_counter", lambda: now)
    assert hardware._best_time(torch.device("cpu"), call, budget_s=6.0) == 1.0
    assert next(durations) == 0.5, "the budget was used up"


def test_peak_is_work_per_second(monkeypatch):
    """FLOPs are those that torch counts, and bytes are those that a copy reads and writes."""
    work = []

    def one_second(device, call, *, budget_s):
        with FlopCounterMode(display=False) as counter:
            result = call()
        work.append(counter.get_total_flops() or 2 * result.nbytes)
        return 1.0

    monkeypatch.setattr(hardware, "_best_time", one_second)
    peak = measure_peak.__wrapped__(torch.device("cpu"))
    assert [peak.half_tflops * 1e12, peak.fp32_tflops * 1e12] == pytest.approx(work[:2])
    assert peak.bandwidth_gb_s * 1e9 == pytest.approx(work[2])


def test_detected_peak_depends_on_the_dtype(monkeypatch):
    monkeypatch.setattr("whet.hardware.driver_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("whet.hardware.choose_device", lambda _: torch.device("cuda"))
    assert whet.detect_peak_tflops("cuda", torch.bfloat16) == 989
    assert whet.detect_peak_tflops("cuda", torch.float32) == 67


def test_unavailable_device_has_no_peak():
    assert whet.detect_peak_tflops("warp:9") is None
    assert whet.detect_peak_tflops("cpu") > 0
