"""Messages and lists that docs quote are those of the code."""

import re
from pathlib import Path

import pytest
import yaml

from whet.config.checks.unread_keys import unused_key_messages
from whet.config.load_config import load_config, validate_config
from whet.config.metric_direction import lower_is_better
from whet.errors import ConfigError
from whet.hardware import CHIPS
from whet.parallel.watchdog import Heartbeat

DOCS = Path(__file__).parents[1] / "docs"
MINIMAL = {"model": "nano", "data": {"train": "train.jsonl"}, "run": {"steps": 1, "batch_size": 1}}


def page(name):
    return (DOCS / f"{name}.md").read_text()


def test_error_of_an_invalid_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = {**MINIMAL, "method": {"rnk": 8}, "optim": {"learning_rte": 1e-3}}
    config["run"] = {"steps": 0, "batch_size": 8}
    Path("tickets.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError) as caught:
        load_config("tickets.yaml")
    assert f"```text\nerror: {caught.value}\n```" in page("config")


def test_warning_about_a_key_without_effect():
    config = validate_config({**MINIMAL, "method": {"kind": "full", "rank": 4}})
    [message] = unused_key_messages(config)
    assert f"`{message}`" in page("config")


def test_message_about_a_rank_that_died():
    state = Heartbeat(pid=4711, host="node-7", step=1204, activity="micro-batch 2 of 4")
    state.collective = "all-reduce of gradients 3 of 3"
    assert f"rank 1 (process 4711 on node-7) died {state.describe()}\n" in page("scale")


def test_every_device_of_a_plan_is_listed():
    devices = page("plan").partition("\n## Devices\n")[2]
    listed = set(re.findall(r"[\w-]+", devices))
    apple = {
        f"m{n}{suffix}" for n in range(1, 5) for suffix in ("", "-pro", "-max")
    }  # the page abbreviates them
    apple |= {"m2-ultra"}
    assert {chip.name for chip in CHIPS} - listed - apple == set()


def test_direction_of_metrics():
    section = page("metrics").partition("\n## Is lower or higher better?\n")[2]
    table, _, text = section.partition("\nLower is also better")
    endings = re.findall(r"`([a-z_]+)`", "".join(re.findall(r"^\| (`[^|]*) \|", table, flags=re.M)))
    costs = re.findall(r"`([a-z_]+)`", text.partition("For every other")[0])
    assert len(endings) > 8
    assert len(costs) > 5
    assert all(lower_is_better(f"eval_{ending}") for ending in endings)
    assert all(lower_is_better(name) for name in costs)
    assert not any(map(lower_is_better, ("accuracy", "exact_match_loss", "eval_reward_loss", "tokens_per_s")))
