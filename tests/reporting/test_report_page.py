"""The report page: its contents for every kind of run, self-containedness, and robustness to damaged files."""

import json
import math
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import yaml

from whet.errors import CheckpointError, ConfigError
from whet.evaluation.classifier_metrics import multi_label_report, single_label_report, softmax
from whet.reporting.run.report_page import report_page, write_report
from whet.reporting.run.router_maps import MAX_LAYERS, _bin_steps
from whet.reporting.run.run_list import list_runs, runs_text
from whet.runs.metric_series import downsample, smooth
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
    """Checks that tags are nested correctly, and collects ids, links and text."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.ids, self.links, self.inside = [], [], [], [], {}
        self.text = ""
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
        self.text += data


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
    """Write the files of a run without training."""
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    rows = [*training_rows(), summary()] if rows is None else rows
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (directory / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    if final:
        (directory / "final").mkdir()
    for key, value in files.items():
        path = directory / (f"{key}.jsonl" if key == "samples" else f"{key}.json")
        is_list = isinstance(value, list)
        path.write_text("\n".join(map(json.dumps, value)) if is_list else json.dumps(value))
    return directory


@pytest.fixture
def new_run(tmp_path):
    """Return a function that writes the files of a run."""
    return lambda rows=None, *, name="demo", **more: write_run(tmp_path / "runs" / name, rows, **more)


def page_of(directory):
    """Return the page of a run, after checking that it is well-formed and self-contained."""
    text = report_page(read_run(directory))
    page = Page(text)
    assert "script" not in page.tags
    assert len(set(page.ids)) == len(page.ids)
    for link in page.links:
        assert link.startswith("data:image/png;base64,") or re.search(r"#([\w-]+)", link)[1] in page.ids
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert ("currentColor" in text) is ("<svg" in text)  # axes in the text color of the page, dark or light
    assert not re.search(r"#0[0-9a-f]{5}|fill: (black|white|#ffffff)(?!.*</text>)", text)
    assert not re.search(r"https?://", text)
    return page


def charts(page):
    ids = {name for name in page.ids if name.startswith("chart-")}
    assert all(page.inside[name].count("svg") == 1 for name in ids)
    return {name.removeprefix("chart-") for name in ids}


def sections(page):
    return [name for name in page.ids if page.inside.get(name, ())[:1] == ["h2"]]


def test_report_has_facts_curves_config_and_commands(new_run):
    provenance = {
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
    directory = new_run(
        [*training_rows(**more), summary(test={"loss": 0.5, "s": 1.0})], provenance=provenance
    )
    page = page_of(directory)
    assert sections(page) == ["curves", "commands", "environment", "config"]
    assert charts(page) == {"loss", "lr", "grad_norm", "tokens_per_s", "peak_gib"}
    for expected in (
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
        assert expected in page.text


@pytest.mark.parametrize(
    ("rows", "final", "expected"),
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
def test_status_comes_from_the_last_row(new_run, rows, final, expected):
    directory = new_run(rows, final=final)
    page = page_of(directory)
    assert expected in page.text
    assert (f"whet resume {directory}" in page.text) is not final
    assert list_runs(directory.parent)[0].status == expected.partition(":")[0]


def test_objective_metrics_have_charts(new_run):
    more = {"reward_mean": lambda step: step / 60, "reward margin/<b>": lambda step: 1.0}
    rows = list(training_rows(**more, router_layers=lambda step: [0], skipped=lambda step: True))
    rows.append({"step": 60, "reward_mean": 0.5, "exact_match": 0.25, "eval_s": 1.0})
    page = page_of(new_run(rows))
    assert sections(page)[:2] == ["curves", "metrics"]
    assert {"reward_mean", "exact_match", "reward-32-margin-47--60-b-62-"} <= charts(page)
    assert not {"skipped", "router_layers", "tokens", "eval_s"} & charts(page)


def test_training_and_evaluation_share_a_chart(new_run):
    rows = list(training_rows(kl=lambda step: step / 60, margin=lambda step: 1.0))
    rows.append({"step": 60, "eval_kl": 0.5, "eval_bits_per_byte": 2.0, "eval_s": 1.0})
    page = page_of(new_run(rows))
    assert {"kl", "margin", "eval_bits_per_byte"} <= charts(page)
    assert "eval_kl" not in charts(page)
    assert "training 0.01667 → 1; evaluation 0.5" in page.text


def test_report_plans_memory_for_the_device_of_the_run(new_run):
    """Without a known model or device, the page has no plan."""
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
    assert "Planned memory" in page.text
    assert "of the plan" in page.text
    on_cpu = new_run(rows, name="slow", config=config, provenance={"machine": {"device": "cpu: fast"}})
    page = Page(write_report(on_cpu).read_text())
    assert "Planned memory" in page.text
    assert "of the plan" not in page.text  # on a CPU, the process has more than the run
    for name, change in (
        ("unknown", {"provenance": {"machine": {"device": "cuda: Abacus 3"}}}),
        ("gone", {"config": {**config, "model": "/nowhere/model", "method": {}}, "provenance": machine}),
        ("older", {}),
    ):
        odd = new_run(rows, name=name, **{"config": config, **change})
        assert "Planned memory" not in Page(write_report(odd).read_text()).text


def test_report_shows_throughput_mfu_and_planned_memory(new_run):
    more = {
        "tokens_per_s": lambda step: 100.0 if step < 31 else 300.0,
        "mfu": lambda step: 0.4321,
        "peak_gib": lambda step: 1.5,
        "steps_per_s": lambda step: 2.0,
    }
    plan = {"bytes": {"weights": 2**29, "optimizer": 0, "peak": 2**31, "peak_at": "loss"}}
    page = page_of(new_run([*training_rows(**more), summary()], plan=plan))
    assert charts(page) == {"loss", "tokens_per_s", "mfu", "peak_gib"}
    for expected in ("200median tokens/s", "43.2%median MFU", "1.5 GiBpeak memory, 75% of the plan"):
        assert expected in page.text
    assert "planned 2" in page.text
    assert "weights0.5 GiB" in page.text
    assert "optimizer0" not in page.text
    for odd in ({"bytes": {"peak": "nan"}}, {"bytes": [1]}, {"bytes": {"peak": -1, "x": "inf"}}):
        assert "planned" not in page_of(new_run(name=f"odd {odd}".replace("/", ""), plan=odd)).text


@pytest.mark.parametrize("layers", [2, 30])
def test_probes_are_lines_or_heat_maps_by_layer(new_run, layers):
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
    assert "gradient norm, by layer" in page.text


@pytest.mark.parametrize("layers", [1, 3, 40])
def test_router_maps_have_one_panel_per_layer_up_to_a_limit(new_run, layers):
    share = [[0.5, 0.25, 0.25, 0.0]] * layers
    more = {"router_share": lambda step: share, "router_layers": lambda step: list(range(layers))}
    rows = [*training_rows(3, **more), {"step": 61, "loss": 1.0, "router_share": "nan"}]
    page = page_of(new_run(rows))
    assert "routers" in sections(page)
    assert "router-load" in charts(page)
    assert page.inside["routers"].count("image") == min(layers, MAX_LAYERS) + 1  # and the color bar
    assert "layer 0" in page.text
    assert f"layer {layers - 1}" in page.text
    assert ("8 of 40 layers are shown" in page.text) is (layers == 40)


@pytest.mark.parametrize("steps", [200, 300, 1000])
def test_router_map_columns_average_equal_numbers_of_steps(steps):
    shares = np.arange(steps, dtype=float)[:, None, None]
    bins = _bin_steps(shares)[:, 0, 0]
    assert len(bins) <= 240
    size = math.ceil(steps / 240)
    np.testing.assert_allclose(bins[:-1], np.arange(len(bins) - 1) * size + (size - 1) / 2)


def test_single_router_is_shown(new_run):
    more = {"per_expert_share": lambda step: [0.5, "nan", 0.25, None]}
    assert "router-load" in charts(page_of(new_run(list(training_rows(**more)))))


def classified(names, *, marks=False):
    rng = np.random.default_rng(0)
    labels = rng.integers(len(names), size=60)
    chances = softmax(rng.normal(size=(60, len(names))) + 2 * np.eye(len(names))[labels])
    report = (
        multi_label_report(chances, np.eye(len(names))[labels], names)
        if marks
        else single_label_report(chances, labels, names)
    )
    report["baselines"]["linear probe"] = {"accuracy": 0.5, "f1_macro": 0.4321}
    return {**report, "split": "valid"}


@pytest.mark.parametrize("marks", [False, True])
def test_classifier_is_shown_with_baselines(new_run, marks):
    report = classified(["a", "b", "c"], marks=marks)
    directory = new_run(
        [summary()], config=CONFIG | {"objective": {"kind": "classify"}}, classification=report
    )
    page = page_of(directory)
    assert "classification" in sections(page)
    assert "classification-plots" in charts(page)
    scores = [f"{report[name]:.3f}" for name in ("accuracy", "f1_macro", "ece")]
    for each in (*scores, "majority", "linear probe", "0.432", "Reliability", f"whet classify {directory}"):
        assert each in page.text


def sample(step, number, completion="4"):
    rewards = {"exact_match": 1.0, "length": -0.5}
    prompt = f"prompt {number}"
    return {"step": step, "prompt": prompt, "completion": completion, "reward": 0.5, "rewards": rewards}


def test_first_and_last_samples_are_shown(new_run):
    samples = [sample(step, f"{step}-{number}") for step in (1, 10, 20) for number in range(9)]
    samples += [{"step": None}, {"step": 30, "prompt": 3, "rewards": "none", "completion": "y" * 5000}]
    page = page_of(new_run([], samples=samples))
    assert "samples" in sections(page)
    assert "prompt 1-0" in page.text
    assert "prompt 10-0" not in page.text
    assert "3,000 more characters" in page.text
    assert "0.5 (exact_match 1, length -0.5)" in page.text


def test_equal_prompts_are_shown_before_and_after(new_run):
    samples = [
        {"step": step, "prompt": prompt, "completion": f"{prompt} at {step}"}
        for step in (0, 30, 60)
        for prompt in ("one", "two")
    ]
    page = page_of(new_run([], samples=samples))
    for expected in (
        "before (step 0)",
        "after (step 60)",
        "one at 0",
        "two at 60",
        "2 of 2 prompts, sampled at 3 steps",
    ):
        assert expected in page.text
    assert "at 30" not in page.text
    assert "reward" not in page.text


def test_report_escapes_untrusted_text(new_run):
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
    text.encode()  # no lone surrogates are left
    page = Page(text)
    assert page.text.count(SCRIPT) >= 8
    assert "$x$ & \\frac{" in page.text


def test_report_is_deterministic(new_run):
    share = {"router_share": lambda step: [[0.5, 0.25], [0.25, 0.75]]}
    directory = new_run([*training_rows(**share), summary()])
    assert report_page(read_run(directory)) == report_page(read_run(directory))


def test_nonfinite_values_are_counted_but_not_drawn(new_run):
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
    assert "3 non-finite values not drawn" in page.text


def test_unreadable_files_are_reported_and_the_rest_is_shown(new_run):
    torn = ["", "not json", '{"step": 1, "lo', "[1]", "[" * 100_000, '{"step": 2, "loss": 1.0}', '{"step"']
    directory = new_run(torn, classification={"classes": ["a"]}, provenance=["no object"])
    (directory / "metrics.jsonl").open("ab").write(b"\xff\xfe\n")
    (directory / "config.yaml").write_text("run: {name: [\n" + SCRIPT)
    page = page_of(directory)
    assert charts(page) == {"loss"}
    for expected in (
        "metrics.jsonl: 6 of its lines cannot be read",
        "classification.json is not a complete report: KeyError",
        "provenance.json is not a JSON object",
        "config.yaml is not a valid config",
    ):
        assert expected in page.text
    assert SCRIPT in page.text  # the config as text


@pytest.mark.parametrize(
    "config", [{}, {"run": 3, "model": {"preset": "nano", "width": None}}, {"objective": [1]}]
)
def test_report_tolerates_invalid_configs(new_run, config):
    page_of(new_run([], config=config, final=False))


def test_config_numbers_are_parsed_as_in_a_run(new_run):
    directory = new_run()
    (directory / "config.yaml").write_text("optim: {lr: 2e-3}\n")
    assert read_run(directory).config["optim"]["lr"] == 0.002


def test_report_rejects_paths_that_are_not_runs(tmp_path):
    (tmp_path / "file").write_text("x")
    for name, message in (("none", "does not exist"), ("file", "is a file"), (".", "is not a run")):
        with pytest.raises(CheckpointError, match=message):
            write_report(tmp_path / name)


def test_missing_matplotlib_error_names_the_extra(new_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError) as caught:
        write_report(new_run())
    assert caught.value.hint == "pip install 'whet[report]'"


def test_long_run_gives_small_page_with_all_peaks(new_run):
    steps, values = list(range(20_000)), [float(step % 7) for step in range(20_000)]
    values[12_345] = 99.0
    thin_steps, thin_values = downsample(steps, values)
    assert len(thin_values) < 700
    assert thin_steps == sorted(set(thin_steps))
    assert (thin_steps[0], thin_steps[-1]) == (0, 19_999)
    assert thin_values[thin_steps.index(12_345)] == 99.0
    page = report_page(
        read_run(new_run([{"step": s, "loss": v} for s, v in zip(steps, values, strict=True)]))
    )
    assert len(page) < 200_000


def test_smoothing_is_an_exponentially_weighted_mean():
    values = np.random.default_rng(0).normal(size=90)
    keep = 1 - 2 / (90 / 30 + 1)
    distance = np.abs(np.subtract.outer(np.arange(90), np.arange(90)))
    weights = keep**distance
    np.testing.assert_allclose(smooth(list(values)), weights @ values / weights.sum(1), atol=1e-12)
    assert smooth([1.0] * 20) is None


def test_list_runs_marks_damaged_runs(new_run, tmp_path):
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


def test_list_runs_includes_the_runs_of_sweeps(new_run, tmp_path):
    new_run(name="single")
    new_run(name="sweep/lr-1e-3-seed-0")
    new_run([{"step": 7, "loss": 1.25}], name="sweep/lr-1e-4-seed-0", final=False)
    (tmp_path / "runs" / "sweep" / "sweep.json").write_text("{}")
    new_run(name="sweep/.staging")
    new_run(name="archive/old/too-deep")
    runs = {run.name: run for run in list_runs(tmp_path / "runs")}
    assert set(runs) == {"single", "sweep/lr-1e-3-seed-0", "sweep/lr-1e-4-seed-0"}
    assert runs["sweep/lr-1e-3-seed-0"].status == "finished"
    assert runs["sweep/lr-1e-4-seed-0"].metric == "loss 1.25"
    assert {run.name for run in list_runs(tmp_path / "runs" / "sweep")} == {
        "lr-1e-3-seed-0",
        "lr-1e-4-seed-0",
    }


def test_report_shows_the_latest_result_of_each_benchmark_task(tmp_path):
    from whet.evaluation.task_result import Score, TaskResult, append_result

    directory = tmp_path / "run"
    write_run(directory)
    for value in (0.25, 0.75):
        scores = {"acc": Score(value, 0.0433)}
        append_result(directory, TaskResult("key", "house", "1", 2, 100, None, False, scores))
    with (directory / "evaluations.jsonl").open("a") as file:
        file.write('{"task": "incomplete"}\n')
    run = read_run(directory)
    page = report_page(run)
    assert "<section id='benchmarks'>" in page
    assert "0.7500" in page
    assert "± 0.0433" in page
    assert "0.2500" not in page
    assert "evaluations.jsonl: 1 of its rows are not complete results" in page
