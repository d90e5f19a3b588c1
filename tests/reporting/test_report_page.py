"""The page of a run: what is on it for each kind of run, that it stands alone, and that nothing breaks it."""

import json
import math
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import yaml

from whet.errors import CheckpointError, ConfigError
from whet.evaluation.classifier_metrics import marked_report, single_report, softmax
from whet.reporting.run.report_page import report_page, write_report
from whet.reporting.run.router_maps import MOST_LAYERS, _binned
from whet.reporting.run.run_list import list_runs, runs_text
from whet.runs.metric_series import smoothed, thinned
from whet.runs.run_files import read_run

SCRIPT = "<script>alert('x')</script>"
VOID = {"meta", "link", "img", "br", "hr", "input"}
CONFIG = {
    "model": "some-model",
    "method": {"kind": "lora", "rank": 8, "alpha": 16.0, "variant": "lora"},
    "objective": {"kind": "sft"},
    "data": {"train": "train.jsonl", "valid": "valid.jsonl", "test": None},
    "run": {"name": "demo", "dir": "runs", "steps": 60},
}


class Page(HTMLParser):
    """Checks that tags close in order, and collects what the tests ask for."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.ids, self.links, self.inside = [], [], [], [], {}
        self.said = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.start(tag, attributes)
        if tag not in VOID:
            self.open.append((tag, dict(attributes).get("id")))

    def handle_startendtag(self, tag, attributes):
        self.start(tag, attributes)

    def start(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "src", "xlink:href", "action", "data") or "url(" in (value or ""):
                self.links.append(value)
        for _, name in self.open:
            self.inside.setdefault(name, []).append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.said += data


def training_rows(steps=60, **more):
    for step in range(1, steps + 1):
        yield {
            "step": step,
            "loss": 3 * math.exp(-step / 20) + 0.1 * (step % 3),
            "tokens": 100,
            "elapsed_s": 0.05 * step,
            **{name: value(step) for name, value in more.items()},
        }
        if step % 20 == 0:
            yield {"step": step, "eval_loss": 0.2, "eval_perplexity": 2.0, "eval_s": 0.1}


def summary(steps=60, because="finished", **more):
    best = {"metric": "eval_loss", "value": 0.25, "step": 40}
    return {
        "summary": {
            "steps": steps,
            "tokens": 6000,
            "seconds": 375.0,
            "stopped_because": because,
            "best": best,
        }
        | more
    }


def write_run(directory, rows=None, *, final=True, config=CONFIG, **files):
    """The files of a run, by hand."""
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    rows = [*training_rows(), summary()] if rows is None else rows
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (directory / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    if final:
        (directory / "final").mkdir()
    for key, value in files.items():
        path = directory / (f"{key}.jsonl" if key == "samples" else f"{key}.json")
        many = isinstance(value, list)
        path.write_text("\n".join(map(json.dumps, value)) if many else json.dumps(value))
    return directory


@pytest.fixture
def new_run(tmp_path):
    """Writes the files of a run by hand."""
    return lambda rows=None, *, name="demo", **more: write_run(tmp_path / "runs" / name, rows, **more)


def page_of(directory):
    """The page, after what holds for every one: well-formed, and alone."""
    text = report_page(read_run(directory))
    page = Page(text)
    assert "script" not in page.tags
    assert len(set(page.ids)) == len(page.ids)
    for link in page.links:
        assert link.startswith("data:image/png;base64,") or re.search(r"#([\w-]+)", link)[1] in page.ids
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert ("currentColor" in text) is ("<svg" in text)  # axes in the ink of the page, dark or light
    assert not re.search(r"#0[0-9a-f]{5}|fill: (black|white|#ffffff)(?!.*</text>)", text)
    assert not re.search(r"https?://", text)
    return page


def charts(page):
    found = {name for name in page.ids if name.startswith("chart-")}
    assert all(page.inside[name].count("svg") == 1 for name in found)
    return {name.removeprefix("chart-") for name in found}


def sections(page):
    return [name for name in page.ids if page.inside.get(name, ())[:1] == ["h2"]]


def test_a_run_has_its_facts_curves_config_and_commands(new_run):
    origins = {
        "versions": {"torch": "2.99"},
        "machine": {"device": "cuda: Some GPU"},
        "git_commit": None,
        "base": "abc",
        "data_sha256": {"train": "def"},
    }
    more = {
        "lr": lambda step: 1e-5 * step,
        "grad_norm": lambda step: 1.0 + step % 5,
        "tokens_per_s": lambda step: 2000.0 + step,
        "peak_gib": lambda step: 1.25,
    }
    directory = new_run([*training_rows(**more), summary(test={"loss": 0.5, "s": 1.0})], provenance=origins)
    page = page_of(directory)
    assert sections(page) == ["curves", "commands", "environment", "config"]
    assert charts(page) == {"loss", "lr", "grad_norm", "tokens_per_s", "peak_gib"}
    for said in (
        *("demo", "finished", "some-model", "lora, rank 8, alpha 16", "sft", "train.jsonl", "6,000"),
        *(
            "6 min 15 s",
            "eval loss 0.25 at step 40",
            "loss 0.5",
            "2.99",
            "Some GPU",
            "rank: 8",
            "training",
            "evaluation",
        ),
        *(f"whet chat {directory}", f"whet train {directory}/config.yaml run.name=demo-again"),
    ):
        assert said in page.said


@pytest.mark.parametrize(
    ("rows", "final", "said"),
    [
        ([], False, "not finished"),
        ([{"step": 1, "loss": 2.0}], False, "not finished"),
        (
            [{"step": 1, "loss": 2.0}, summary(because="SIGINT after step 1")],
            False,
            "stopped: SIGINT after step 1",
        ),
        ([{"step": 1, "loss": 2.0}, summary(because="no better")], True, "finished: no better"),
        ([summary(), {"step": 61, "loss": 2.0}], False, "not finished"),
    ],
)
def test_the_status_is_what_the_last_row_says(new_run, rows, final, said):
    directory = new_run(rows, final=final)
    page = page_of(directory)
    assert said in page.said
    assert (f"whet resume {directory}" in page.said) is not final
    assert list_runs(directory.parent)[0].status == said.partition(":")[0]


def test_metrics_of_the_objective_are_small_multiples(new_run):
    more = {"reward_mean": lambda step: step / 60, "reward margin/<b>": lambda step: 1.0}
    rows = list(training_rows(**more, router_layers=lambda step: [0], skipped=lambda step: True))
    rows.append({"step": 60, "reward_mean": 0.5, "exact_match": 0.25, "eval_s": 1.0})
    page = page_of(new_run(rows))
    assert sections(page)[:2] == ["curves", "metrics"]
    assert {"reward_mean", "exact_match", "reward-32-margin-47--60-b-62-"} <= charts(page)
    assert not {"skipped", "router_layers", "tokens", "eval_s"} & charts(page)


def test_training_and_evaluation_of_a_metric_share_a_plot(new_run):
    rows = list(training_rows(kl=lambda step: step / 60, margin=lambda step: 1.0))
    rows.append({"step": 60, "eval_kl": 0.5, "eval_bits_per_byte": 2.0, "eval_s": 1.0})
    page = page_of(new_run(rows))
    assert {"kl", "margin", "eval_bits_per_byte"} <= charts(page)
    assert "eval_kl" not in charts(page)
    assert "training 0.01667 → 1; evaluation 0.5" in page.said


def test_memory_is_planned_for_the_device_of_the_run_when_the_page_is_written(new_run):
    """Of whatever device this is; a model or a device that nobody knows is a page without a plan."""
    config = {
        "model": {"preset": "nano", "tokenizer": "bytes"},
        "method": {"kind": "full"},
        "data": {"train": "gone.jsonl", "max_length": 64},
        "run": {"name": "demo", "steps": 60, "batch_tokens": 512},
    }
    rows = [*training_rows(peak_gib=lambda step: 0.5), summary()]
    machine = {"machine": {"device": "cuda: NVIDIA H100 80GB HBM3"}}
    known = new_run(rows, config=config, provenance=machine)
    page = Page(write_report(known).read_text())
    assert "Memory, as planned" in page.said
    assert "of the plan" in page.said
    on_cpu = new_run(rows, name="slow", config=config, provenance={"machine": {"device": "cpu: fast"}})
    page = Page(write_report(on_cpu).read_text())
    assert "Memory, as planned" in page.said
    assert "of the plan" not in page.said  # a process is more than a run
    for name, change in (
        ("unknown", {"provenance": {"machine": {"device": "cuda: Abacus 3"}}}),
        ("gone", {"config": {**config, "model": "/nowhere/model", "method": {}}, "provenance": machine}),
        ("older", {}),
    ):
        odd = new_run(rows, name=name, **{"config": config, **change})
        assert "as planned" not in Page(write_report(odd).read_text()).said


def test_speed_and_memory_are_shown_against_peak_and_plan(new_run):
    more = {
        "tokens_per_s": lambda step: 100.0 if step < 31 else 300.0,
        "mfu": lambda step: 0.4321,
        "peak_gib": lambda step: 1.5,
        "steps_per_s": lambda step: 2.0,
    }
    plan = {"bytes": {"weights": 2**29, "optimizer": 0, "peak": 2**31, "peak_at": "loss"}}
    page = page_of(new_run([*training_rows(**more), summary()], plan=plan))
    assert charts(page) == {"loss", "tokens_per_s", "mfu", "peak_gib"}
    for said in ("200tokens a second, median", "43.2%MFU, median", "1.5 GiBpeak memory, 75% of the plan"):
        assert said in page.said
    assert "planned 2" in page.said
    assert "weights0.5 GiB" in page.said
    assert "optimizer0" not in page.said
    for odd in ({"bytes": {"peak": "nan"}}, {"bytes": [1]}, {"bytes": {"peak": -1, "x": "inf"}}):
        assert "planned" not in page_of(new_run(name=f"odd {odd}".replace("/", ""), plan=odd)).said


@pytest.mark.parametrize("layers", [2, 30])
def test_probes_have_a_section_with_lines_or_a_map_by_layer(new_run, layers):
    more = {
        "exp_grad_norm_layer": lambda step: [0.1 * step + layer for layer in range(layers)],
        "exp_grad_norm_mean": lambda step: 0.1 * step,
        "exp_weight_norm_rest": lambda step: 0.0,
        "exp_attn_entropy_layer": lambda step: [None, *([1.5] * (layers - 1))],
        "exp_act_norm_layer": lambda step: ["nan"] * layers,
        "exp_own_layer": lambda step: [step] * (1 + step % 2),
        "exp_odd_layer": lambda step: "none",
    }
    page = page_of(new_run([*training_rows(5, **more), summary()]))
    assert sections(page)[:2] == ["curves", "probes"]
    assert charts(page) == {
        *("loss", "exp_grad_norm_layer", "exp_attn_entropy_layer", "exp_grad_norm_mean", "exp_own_layer"),
    }
    assert ("image" in page.inside["chart-exp_grad_norm_layer"]) is (layers == 30)
    assert "gradient norm, by layer" in page.said


@pytest.mark.parametrize("layers", [1, 3, 40])
def test_routers_have_a_panel_a_layer_up_to_a_limit(new_run, layers):
    share = [[0.5, 0.25, 0.25, 0.0]] * layers
    more = {"router_share": lambda step: share, "router_layers": lambda step: list(range(layers))}
    rows = [*training_rows(3, **more), {"step": 61, "loss": 1.0, "router_share": "nan"}]
    page = page_of(new_run(rows))
    assert "routers" in sections(page)
    assert "router-load" in charts(page)
    assert page.inside["routers"].count("image") == min(layers, MOST_LAYERS) + 1  # and the scale
    assert "layer 0" in page.said
    assert f"layer {layers - 1}" in page.said
    assert ("8 of 40 layers are shown" in page.said) is (layers == 40)


@pytest.mark.parametrize("steps", [200, 300, 1000])
def test_columns_of_a_long_run_are_means_of_as_many_steps_each(steps):
    shares = np.arange(steps, dtype=float)[:, None, None]
    found = _binned(shares)[:, 0, 0]
    assert len(found) <= 240
    together = math.ceil(steps / 240)
    np.testing.assert_allclose(found[:-1], np.arange(len(found) - 1) * together + (together - 1) / 2)


def test_one_router_for_the_whole_model_is_shown_too(new_run):
    more = {"per_expert_share": lambda step: [0.5, "nan", 0.25, None]}
    assert "router-load" in charts(page_of(new_run(list(training_rows(**more)))))


def classified(names, *, marks=False):
    rng = np.random.default_rng(0)
    labels = rng.integers(len(names), size=60)
    chances = softmax(rng.normal(size=(60, len(names))) + 2 * np.eye(len(names))[labels])
    found = (
        marked_report(chances, np.eye(len(names))[labels], names)
        if marks
        else single_report(chances, labels, names)
    )
    found["baselines"]["linear probe"] = {"accuracy": 0.5, "f1_macro": 0.4321}
    return {**found, "split": "valid"}


@pytest.mark.parametrize("marks", [False, True])
def test_a_classifier_is_shown_beside_its_baselines(new_run, marks):
    report = classified(["a", "b", "c"], marks=marks)
    directory = new_run(
        [summary()], config=CONFIG | {"objective": {"kind": "classify"}}, classification=report
    )
    page = page_of(directory)
    assert "classification" in sections(page)
    assert "classification-plots" in charts(page)
    said = [f"{report[name]:.3f}" for name in ("accuracy", "f1_macro", "ece")]
    for each in (*said, "majority", "linear probe", "0.432", "Reliability", f"whet classify {directory}"):
        assert each in page.said


def sample(step, number, completion="4"):
    rewards = {"exact_match": 1.0, "length": -0.5}
    prompt = f"prompt {number}"
    return {"step": step, "prompt": prompt, "completion": completion, "reward": 0.5, "rewards": rewards}


def test_the_first_and_the_last_samples_are_shown(new_run):
    samples = [sample(step, f"{step}-{number}") for step in (1, 10, 20) for number in range(9)]
    samples += [{"step": None}, {"step": 30, "prompt": 3, "rewards": "none", "completion": "y" * 5000}]
    page = page_of(new_run([], samples=samples))
    assert "samples" in sections(page)
    assert "prompt 1-0" in page.said
    assert "prompt 10-0" not in page.said
    assert "3,000 more characters" in page.said
    assert "0.5 (exact_match 1, length -0.5)" in page.said


def test_the_same_prompts_are_shown_before_and_after(new_run):
    samples = [
        {"step": step, "prompt": prompt, "completion": f"{prompt} at {step}"}
        for step in (0, 30, 60)
        for prompt in ("one", "two")
    ]
    page = page_of(new_run([], samples=samples))
    for said in ("before (step 0)", "after (step 60)", "one at 0", "two at 60", "2 of 2 prompts, at 3 steps"):
        assert said in page.said
    assert "at 30" not in page.said
    assert "reward" not in page.said


def test_texts_of_others_are_escaped_everywhere(new_run):
    config = CONFIG | {"model": SCRIPT, "run": {"name": SCRIPT, "steps": 60}}
    report = classified([SCRIPT, "$x$ & \\frac{", "中"])
    directory = new_run(
        [*training_rows(**{SCRIPT: lambda step: 1.0}), summary(because=SCRIPT), "{" + SCRIPT],
        config=config,
        classification=report,
        samples=[sample(1, SCRIPT, completion=f"]]>--></td>{SCRIPT}\ud800\x1b\n")],
        provenance={"versions": {SCRIPT: SCRIPT}, SCRIPT: [SCRIPT]},
    )
    text = report_page(read_run(directory))
    assert "<script" not in text
    text.encode()  # it can be written
    page = Page(text)
    assert page.said.count(SCRIPT) >= 8
    assert "$x$ & \\frac{" in page.said


def test_equal_files_give_equal_pages(new_run):
    share = {"router_share": lambda step: [[0.5, 0.25], [0.25, 0.75]]}
    directory = new_run([*training_rows(**share), summary()])
    assert report_page(read_run(directory)) == report_page(read_run(directory))


def test_numbers_that_are_not_finite_are_counted_and_not_drawn(new_run):
    rows = [
        {"step": 1, "loss": "nan", "lr": "inf", "grad_norm": None},
        {"step": 2, "loss": 1.5, "lr": "inf", "grad_norm": "-inf"},
        {"step": 3, "loss": 1e300, "lr": 10**400, "grad_norm": {}},
        {"step": 10**400, "loss": 1.0},
        {"step": "4", "loss": 1.0},
        {"step": True, "loss": 1.0},
        '{"step": 5, "loss": NaN}',
    ]
    page = page_of(new_run([*rows, summary(tokens="nan", seconds="inf", best={"metric": 3, "value": "nan"})]))
    assert charts(page) == {"loss"}
    assert "3 not finite, not drawn" in page.said


def test_what_cannot_be_read_is_named_and_the_rest_is_shown(new_run):
    torn = ["", "not json", '{"step": 1, "lo', "[1]", "[" * 100_000, '{"step": 2, "loss": 1.0}', '{"step"']
    directory = new_run(torn, classification={"classes": ["a"]}, provenance=["no object"])
    (directory / "metrics.jsonl").open("ab").write(b"\xff\xfe\n")
    (directory / "config.yaml").write_text("run: {name: [\n" + SCRIPT)
    page = page_of(directory)
    assert charts(page) == {"loss"}
    for said in (
        "metrics.jsonl: 6 of its lines cannot be read",
        "classification.json is not a whole report: KeyError",
        "provenance.json is not a JSON object",
        "config.yaml is no valid config",
    ):
        assert said in page.said
    assert SCRIPT in page.said  # the config as text


@pytest.mark.parametrize(
    "config", [{}, {"run": 3, "model": {"preset": "nano", "width": None}}, {"objective": [1]}]
)
def test_an_odd_config_is_no_obstacle(new_run, config):
    page_of(new_run([], config=config, final=False))


def test_numbers_of_a_config_are_read_as_a_run_reads_them(new_run):
    directory = new_run()
    (directory / "config.yaml").write_text("optim: {lr: 2e-3}\n")
    assert read_run(directory).config["optim"]["lr"] == 0.002


def test_what_is_no_run_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for place, said in (("none", "does not exist"), ("file", "is a file"), (".", "is not a run")):
        with pytest.raises(CheckpointError, match=said):
            write_report(tmp_path / place)


def test_without_matplotlib_the_extra_is_named(new_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError) as refused:
        write_report(new_run())
    assert refused.value.hint == "pip install 'whet[report]'"


def test_a_long_run_makes_a_small_page_with_every_peak(new_run):
    steps, values = list(range(20_000)), [float(step % 7) for step in range(20_000)]
    values[12_345] = 99.0
    kept_steps, kept = thinned(steps, values)
    assert len(kept) < 700
    assert kept_steps == sorted(set(kept_steps))
    assert (kept_steps[0], kept_steps[-1]) == (0, 19_999)
    assert kept[kept_steps.index(12_345)] == 99.0
    page = report_page(
        read_run(new_run([{"step": s, "loss": v} for s, v in zip(steps, values, strict=True)]))
    )
    assert len(page) < 200_000


def test_smoothing_is_the_weighted_mean_that_it_says_it_is():
    values = np.random.default_rng(0).normal(size=90)
    keep = 1 - 2 / (90 / 30 + 1)
    distance = np.abs(np.subtract.outer(np.arange(90), np.arange(90)))
    weights = keep**distance
    np.testing.assert_allclose(smoothed(list(values)), weights @ values / weights.sum(1), atol=1e-12)
    assert smoothed([1.0] * 20) is None


def test_runs_are_listed_and_broken_ones_are_question_marks(new_run, tmp_path):
    new_run(name="good")
    new_run([{"step": 7, "loss": 1.25}], name="open", final=False)
    new_run(["garbage", "{"], name="broken", final=False)
    new_run([], name="empty", final=False)
    (tmp_path / "runs" / "no run").mkdir()
    (tmp_path / "runs" / "file").write_text("x")
    (tmp_path / "runs" / "good" / "link").symlink_to("nowhere")
    (tmp_path / "runs" / "loop").symlink_to(tmp_path / "runs" / "loop")
    (tmp_path / "runs" / "good" / "large").write_bytes(bytes(3 * 2**20))
    runs = {run.name: run for run in list_runs(tmp_path / "runs")}
    assert set(runs) == {"good", "open", "broken", "empty"}
    assert (runs["good"].status, runs["good"].step, runs["good"].metric) == (
        "finished",
        "60",
        "eval loss 0.25 at step 40",
    )
    assert (runs["open"].status, runs["open"].step, runs["open"].metric) == ("not finished", "7", "loss 1.25")
    assert (runs["broken"].status, runs["broken"].step, runs["broken"].metric) == ("?", "?", "?")
    assert runs["empty"].status == "not finished"
    assert 3 * 2**20 < runs["good"].size < 3.1 * 2**20
    lines = runs_text([runs["good"]], runs["good"].changed + 7200).split("\n")
    assert lines[0].split() == ["name", "status", "step", "metric", "size", "age"]
    assert lines[1].endswith("3.0 MiB  2 h")
