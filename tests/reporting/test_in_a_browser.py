"""Every page in headless Chromium: the charts are drawn, and the console shows no errors."""

import base64
import re

import psutil
import pytest
import typer
import yaml

import whet
from browser import MEASURE, Browser, find_chromium
from reporting.test_report_page import CONFIG, classified, sample, summary, training_rows, write_run
from studies.test_compare_runs import write_seed
from tiny import run_config
from whet.cli.app import app
from whet.reporting.compare.compare_page import write_comparison
from whet.reporting.run.report_page import write_report
from whet.studies.compare_runs import compare_runs

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="no Chromium here")

TRAINING = {
    "lr": lambda step: 1e-5 * step,
    "grad_norm": lambda step: 1.0 + step % 5,
    "tokens_per_s": lambda step: 2000.0 + step,
    "mfu": lambda step: 0.4,
    "peak_gib": lambda step: 1.25,
    "reward_mean": lambda step: step / 60,
    "router_share": lambda step: [[0.5, 0.25, 0.25, 0.0]] * 3,
    "exp_grad_norm_layer": lambda step: [float(layer) for layer in range(24)],
    "exp_effective_rank_layer": lambda step: [2.0, 3.0],
    "exp_grad_noise_scale": lambda step: 100.0 + step,
}
CHARTS = {"loss", *TRAINING, "classification-plots", "router-load"} - {"router_share"}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    directory = tmp_path_factory.mktemp("browser")
    with Browser(directory) as chromium:
        yield chromium
    processes = [
        p for p in psutil.process_iter(["cmdline"]) if str(directory) in " ".join(p.info["cmdline"] or [])
    ]
    assert processes == []  # all of its processes have ended


def open_page(browser, path, charts, **how):
    """Load a page and check the properties that all pages share."""
    page_facts = browser.open(path, **how)
    assert browser.said == []
    assert [url for url in browser.fetched if not url.startswith("data:")] == [path.resolve().as_uri()]
    assert page_facts["overflow"] == 0, "the page scrolls horizontally"
    assert set(page_facts["charts"]) == charts
    for name, chart in page_facts["charts"].items():
        assert chart["pictures"] == 1, name
        assert chart["width"] > 200, name
        assert chart["height"] > 50, name
        assert chart["lines"] > 3, name
        assert chart["letters"] > 7, f"{name}: too small to read"
        assert chart["ink"] == page_facts["ink"], f"{name} is not in the page's text color"
    return page_facts


def brightness(color):
    return sum(map(int, re.findall(r"\d+", color)[:3])) / 3


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of a run with every section."""
    run = write_run(
        tmp_path_factory.mktemp("reported") / "demo",
        [*training_rows(**TRAINING), summary(test={"loss": 0.5, "s": 1.0})],
        config=CONFIG | {"objective": {"kind": "classify"}},
        classification=classified(["a", "b", "a much longer name of a class <b>"]),
        samples=[sample(step, "x" * 300) for step in (0, 60)],
        provenance={"versions": {"torch": "2.99"}, "data_sha256": {"train": "0123456789abcdef" * 4}},
        plan={"bytes": {"weights": 2**29, "peak": 2**30}},
    )
    return write_report(run)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    directory = tmp_path_factory.mktemp("compared")
    for lr in (1.0, 2.0, 4.0):
        for seed in (0, 1):
            write_seed(directory, f"{lr}-{seed}", 1 / lr + seed, lr=lr, seed=seed)
    return write_comparison(compare_runs([directory]), directory / "compare.html")


HOW = pytest.mark.parametrize(
    "how",
    [{}, {"dark": True}, {"width": 400}, {"width": 400, "dark": True}],
    ids=["light", "dark", "narrow", "both"],
)


@HOW
def test_report_page_in_browser(browser, report, how):
    page_facts = open_page(browser, report, CHARTS, **how)
    assert page_facts["title"] == "demo: report"
    assert page_facts["sections"] == [
        *("curves", "metrics", "probes", "routers", "classification"),
        *("samples", "commands", "environment", "config"),
    ]
    assert (brightness(page_facts["paper"]) < 60) is ("dark" in how)
    assert abs(brightness(page_facts["paper"]) - brightness(page_facts["ink"])) > 150


@HOW
def test_comparison_page_in_browser(browser, comparison, how):
    charts = {"intervals", "swept-optim-46-lr", "eval_loss", "loss", "lr", "tokens_per_s"}
    page_facts = open_page(browser, comparison, charts, **how)
    assert "best: lr=4" in page_facts["text"]


def test_pages_print(browser, report, comparison):
    for page in (report, comparison):
        browser.open(page, dark=True)
        browser.call("Emulation.setEmulatedMedia", media="print")  # printing ignores the dark theme
        colors = browser.evaluate(MEASURE)
        assert brightness(colors["paper"]) > 250
        assert brightness(colors["ink"]) < 60
        pdf = base64.b64decode(browser.printed())
        assert pdf.startswith(b"%PDF")
        assert len(re.findall(rb"/Type\s*/Page\b", pdf)) >= 2


def test_browser_detects_broken_pages(browser, tmp_path):
    page = tmp_path / "broken.html"
    page.write_text(
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'\">"
        "<figure id='chart-x'></figure><img src='missing.png'><script>alert(1)</script>"
    )
    page_facts = browser.open(page)
    assert len(browser.said) == 2  # the picture and the script are both blocked
    assert page_facts["charts"]["x"]["pictures"] == 0


def test_report_and_data_pages_of_a_real_run(browser, tiny_directory, tmp_path):
    config = run_config(tiny_directory, tmp_path, run={"steps": 3}, eval={"every": 2})
    run = whet.train(config).directory
    charts = {"loss", "lr", "grad_norm", "tokens_per_s", "peak_gib", "eval_bits_per_byte"}
    if '"mfu":' in (run / "metrics.jsonl").read_text():  # if this machine's peak is known
        charts.add("mfu")
    page_facts = open_page(browser, write_report(run), charts)
    assert "whet chat" in page_facts["text"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    command = typer.main.get_command(app)
    arguments = ["data", str(tmp_path / "config.yaml"), "--html", str(tmp_path / "data.html")]
    command.main(arguments, standalone_mode=False)
    for width in (1200, 400):
        page_facts = open_page(browser, tmp_path / "data.html", set(), width=width)
        assert "Training data" in page_facts["text"]
