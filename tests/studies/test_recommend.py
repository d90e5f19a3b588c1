"""Recommended model sizes: from the plan's own estimates, and never smaller with more memory."""

import dataclasses
from pathlib import Path

import pytest

from whet.config.load_config import validate_config
from whet.models.from_scratch.presets import build_spec
from whet.planning.devices import find_target
from whet.planning.plan import plan_run
from whet.reporting.text.recommend_text import recommend_lines
from whet.studies.recommend import MARGIN, METHODS, SHAPES, recommend_for

CONFIG = {
    "model": "described by the test",
    "data": {"train": "none", "max_length": 2048},
    "run": {"steps": 1, "batch_size": 64, "micro_batch_tokens": 2048, "grad_checkpoint": True},
}


def target(name, memory=None):
    device = find_target(name, validate_config(CONFIG))
    return device if memory is None else dataclasses.replace(device, memory=memory)


def parameters(recommendation, method):
    best = recommendation.best[method]
    return 0 if best is None else best.parameters


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ("135M", 134_515_008),
        ("1B", 1_235_814_400),
        ("3B", 3_212_749_824),
        ("8B", 8_030_261_248),
        ("70B", 70_553_706_496),
    ],
)
def test_shapes_have_the_published_parameters(size, count):
    plan = plan_run(validate_config(CONFIG), device="h100", spec=build_spec(SHAPES[size]), suggest=False)
    assert plan.total == count


def test_estimates_are_those_of_plan():
    recommendation = recommend_for(target("rtx4090"), ["1B"])
    for estimate in recommendation.estimates:
        rank = {} if estimate.method == "full" else {"rank": 16, "alpha": 32}
        config = validate_config({**CONFIG, "method": {"kind": estimate.method, **rank}})
        plan = plan_run(config, device="rtx4090", spec=build_spec(SHAPES["1B"]), suggest=False)
        assert estimate.peak == plan.memory.peak


def test_recommended_micro_batch_leaves_the_margin_free():
    device = target("rtx4090")
    tokens = recommend_for(device, ["8B"]).micro_batch_tokens["lora"]
    for more, fits in ((0, True), (2048, False)):
        run = {**CONFIG["run"], "micro_batch_tokens": tokens + more, "batch_size": 1024}
        config = validate_config({**CONFIG, "method": {"kind": "lora", "rank": 16, "alpha": 32}, "run": run})
        plan = plan_run(config, device="rtx4090", spec=build_spec(SHAPES["8B"]), suggest=False)
        assert (plan.memory.peak <= (1 - MARGIN) * device.usable_memory) == fits


def test_more_memory_never_recommends_a_smaller_model():
    memories = [2**28, 6 * 2**30, 24 * 2**30, 96 * 2**30]
    sizes = ["135M", "1B", "3B"]
    recommendations = [recommend_for(target("h200", memory), sizes) for memory in memories]
    for method in METHODS:
        best = [parameters(recommendation, method) for recommendation in recommendations]
        assert best == sorted(best)
        assert best[0] == 0 < best[-1]
    assert [r.best["full"] and r.best["full"].size for r in recommendations] == [None, "135M", "135M", "3B"]


def test_larger_gpu_and_cheaper_method_recommend_larger_models():
    small, large = (
        recommend_for(target(name), ["1B", "3B", "8B", "14B", "32B"]) for name in ("rtx4090", "h200")
    )
    for method in ("full", "lora", "qlora"):
        assert parameters(large, method) > parameters(small, method)
    assert parameters(small, "full") < parameters(small, "lora") < parameters(small, "qlora")


def test_text_has_one_row_per_size_and_one_line_per_method():
    sizes = ["135M", "1B"]
    lines = list(recommend_lines(recommend_for(target("rtx5070", 4 * 2**30), sizes)))
    assert lines[0].startswith("device     rtx5070: 4.00 GiB of memory, 3.80 GiB usable")
    rows = [line.split() for line in lines if line.split()[:1] in ([size] for size in sizes)]
    assert [row[1::3] for row in rows] == [["fits", "fits", "fits"], ["no", "fits", "fits"]]
    assert lines[-3].startswith("full   up to 135M, with run.micro_batch_tokens up to ")
    assert lines[-2].startswith("lora   up to 1B, ")
    assert max(map(len, lines)) <= 100
    empty = list(recommend_lines(recommend_for(target("rtx5070", 2**28), ["1B"])))
    assert empty[-1] == "qlora  no model of the table fits with 10% to spare"


def test_page_shows_what_the_command_prints():
    page = (Path(__file__).parents[2] / "docs" / "choose-a-method.md").read_text()
    assert "\n".join(recommend_lines(recommend_for(target("rtx4090")))) in page
