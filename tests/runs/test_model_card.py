"""Model cards: what they state is true, huggingface_hub reads it, and nothing private is in them."""

import getpass
import json
import re
import shutil
import socket

import pytest
from huggingface_hub import ModelCard
from transformers import AutoTokenizer

import whet
from tiny import run_config
from whet.evaluation.task_result import Score, TaskResult, append_result
from whet.runs.card_text import BASE_PLACEHOLDER, PLACEHOLDER, public_text
from whet.runs.model_card import _base_model, refresh_final_card, write_export_card


@pytest.fixture(scope="module")
def lora_run(tiny_directory, tmp_path_factory):
    sections = {"data": {"test": "synth:house-test:4"}, "eval": {"generate": True, "max_new_tokens": 4}}
    return whet.train(run_config(tiny_directory, tmp_path_factory.mktemp("lora"), **sections), verbose=0)


@pytest.fixture(scope="module")
def full_run(tiny_directory, tmp_path_factory):
    config = run_config(tiny_directory, tmp_path_factory.mktemp("full"), method={"kind": "full"})
    return whet.train(config, verbose=0)


def card_of(directory):
    card = ModelCard.load(directory / "README.md")
    assert ModelCard(str(card)).data.to_dict() == card.data.to_dict()
    return card


def metrics_of(card):
    """Return the metrics of the model-index as {(dataset, metric): value}."""
    return {(each.dataset_name, each.metric_type): each.metric_value for each in card.data.eval_results or ()}


def python_blocks(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


# --- front matter


def test_card_of_a_run_has_its_metrics_and_metadata(lora_run):
    card = card_of(lora_run.directory / "final")
    assert (card.data.library_name, card.data.pipeline_tag) == ("peft", "text-generation")
    assert card.data.tags == ["whet", "sft", "lora"]
    assert card.data.model_name == "test"
    rows = [json.loads(line) for line in (lora_run.directory / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "eval_s" in row][-1]
    test = rows[-1]["summary"]["test"]
    metrics = metrics_of(card)
    assert metrics["validation split", "loss"] == pytest.approx(last["eval_loss"], rel=1e-5)
    assert metrics["validation split", "exact_match"] == last["exact_match"]
    assert metrics["test split", "perplexity"] == pytest.approx(test["perplexity"], rel=1e-5)
    assert not any(name in ("s", "step") for _, name in metrics)
    assert f"| tokens | {rows[-1]['summary']['tokens']:,} |" in card.text
    assert "LoRA, rank 4, alpha 16.0" in card.text


def test_base_on_the_hub_is_linked():
    base = _base_model("smollm2-135m-instruct")
    assert base.hub_id == "HuggingFaceTB/SmolLM2-135M-Instruct"


def with_hub_base(directory, copy):
    """Copy a model, with a card that says it was fine-tuned from one on the hub."""
    shutil.copytree(directory, copy)
    (copy / "README.md").write_text("---\nbase_model: alice/small\n---\n\n# Mine\n")
    return copy


def test_adapter_of_a_fine_tuned_model_does_not_name_the_model_before(tiny_directory, tmp_path):
    tuned = with_hub_base(tiny_directory, tmp_path / "tuned")
    run = whet.train(run_config(tuned, tmp_path), verbose=0).directory
    adapter = card_of(run / "final")
    assert adapter.data.base_model is None, "the adapter does not fit alice/small"
    assert f'from_pretrained("{BASE_PLACEHOLDER}")' in adapter.text
    assert "An adapter, fine-tuned from `tuned`" in adapter.text
    merged = card_of(whet.export(run, output=tmp_path / "hf"))
    assert (merged.data.base_model, merged.data["base_model_relation"]) == ("alice/small", "finetune")


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_export_of_a_fine_tuned_model_is_no_copy_of_its_base(tiny_directory, tmp_path, quantize):
    tuned = with_hub_base(tiny_directory, tmp_path / "tuned")
    card = card_of(whet.export(tuned, output=tmp_path / "export", quantize=quantize))
    assert (card.data.base_model, card.data["base_model_relation"]) == ("alice/small", "finetune")
    assert "A copy of `tuned`, made from [alice/small](https://hf.co/alice/small)" in card.text
    assert ("loads them with `compressed-tensors`" in card.text) == (quantize is not None)


def test_training_datasets_of_the_hub_are_listed(lora_run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(lora_run.directory, copy)
    config = (copy / "config.yaml").read_text()
    mixed = (
        "[{source: 'hf:org/chats:train', weight: 1}, {source: train.jsonl, weight: 2}, 'hf-stream:facts:en']"
    )
    (copy / "config.yaml").write_text(
        config.replace("train: synth:house:24", f"train: {mixed}").replace(
            "test: synth:house-test:4", "test: hf:org/chats:test"
        )
    )
    refresh_final_card(copy)
    card = card_of(copy / "final")
    assert card.data.datasets == ["org/chats", "facts"]
    [dataset_type] = {
        each.dataset_type for each in card.data.eval_results if each.dataset_name == "test split"
    }
    assert dataset_type == "org/chats"


def test_license_and_language_come_from_the_base_but_no_other_claim(tiny_directory, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(tiny_directory, base)
    front = {
        "license": "other",
        "license_name": "mine",
        "license_link": "LICENSE",
        "language": ["en", "de", "!x"],
        "base_model": "org/grandparent",
        "tags": ["award-winning"],
        "model-index": [{"name": "x", "results": []}],
    }
    (base / "README.md").write_text(f"---\n{json.dumps(front)}\n---\n# The best model\nIt scores 99.\n")
    result = whet.train(run_config(base, tmp_path, method={"kind": "full"}), verbose=0)
    exported = whet.export(base, output=tmp_path / "copy")
    for directory in (result.directory / "final", exported):
        card = card_of(directory)
        data = card.data.to_dict()
        assert (data["license"], data["license_name"], data["license_link"]) == ("other", "mine", "LICENSE")
        assert data["language"] == ["en", "de"]
        assert data["base_model"] == "org/grandparent"
        assert "award-winning" not in card.content
        assert "99" not in card.text.partition("## Training")[0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "---\n[1, 2\n---\n",
        "---\nlicense: {a: 1}\n---\n",
        "---\n- 1\n---\n",
        "no front matter",
        "---\n&a [*a]\n---",
    ],
)
def test_damaged_card_of_the_base_is_ignored(tiny_directory, tmp_path, text):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text(text)
    assert _base_model(str(tmp_path)).license == {}


def test_early_stopping_reports_the_restored_step(tiny_directory, tmp_path):
    config = run_config(
        tiny_directory,
        tmp_path,
        eval={"every": 1, "early_stop": {"metric": "eval_loss", "patience": 1}},
        optim={"lr": 5.0, "warmup": 0},
    )
    result = whet.train(config, verbose=0)
    assert result.best["step"] < result.steps
    loss = metrics_of(card_of(result.directory / "final"))["validation split", "loss"]
    assert loss == pytest.approx(result.best["value"], rel=1e-5)


# --- evaluations that come later


def test_card_is_refreshed_unless_it_was_edited(lora_run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(lora_run.directory, copy)
    scores = {"acc": Score(0.25, 0.05)}
    append_result(copy, TaskResult("k", "arc_easy", "1", 2, 40, 40, False, scores))
    refresh_final_card(copy)
    card = card_of(copy / "final")
    assert metrics_of(card)["arc_easy (2-shot, first 40 items)", "acc"] == 0.25
    assert "| 0.25 | ± 0.05 |" in card.text
    edited = card.content.replace("# test", "# My model")
    (copy / "final" / "README.md").write_text(edited)
    append_result(copy, TaskResult("l", "arc_easy", "1", 2, 40, 40, False, {"acc": Score(0.5, 0.05)}))
    refresh_final_card(copy)
    assert (copy / "final" / "README.md").read_text() == edited


# --- privacy and reproducibility

HOSTILE = "alice <b>|`rm`"


def test_cards_do_not_leak(tiny_directory, tmp_path):
    """A path with a user's name, a token and Markdown in it appears in no card."""
    home = tmp_path / "home" / HOSTILE
    model = home / "models" / "base"
    shutil.copytree(tiny_directory, model)
    rows = [{"prompt": f"{n}+1=", "completion": f"{n + 1}"} for n in range(8)]
    (home / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = run_config(
        model,
        home,
        data={"train": f"{home}/train.jsonl", "valid": f"{home}/train.jsonl"},
        log={"samples": {"prompts": [f"Read {home}/x with hf_abcdefghijklmnop"]}},
    )
    result = whet.train(config, verbose=0)
    directories = [result.directory / "final"]
    directories += [whet.export(result.directory, to=to) for to in ("hf", "peft", "mlx")]
    directories += [whet.export(result.directory / "final", to="peft", output=tmp_path / "again")]
    directories += [whet.export(model, output=tmp_path / "plain")]
    for directory in directories:
        text = card_of(directory).content
        for secret in (str(tmp_path), "alice", "hf_abcdefghijklmnop", socket.gethostname(), "<b>"):
            assert secret not in text, (directory, secret)
        assert not re.search(rf"/{re.escape(getpass.getuser())}\b", text)
        assert "train.jsonl" in text or directory.name == "plain"


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("/home/alice/data/train.jsonl", "train.jsonl"),
        ("~/models/base/", "base"),
        ("../alice/rewards.py:score", "rewards.py:score"),
        (r"C:\Users\alice\x.jsonl", "x.jsonl"),
        (r"\\server\share\x.jsonl", "x.jsonl"),
        ("see /home/alice/notes", "see ~/notes"),
        ("grade with /srv/alice/grader.py now", "grade with grader.py now"),
        ("https://alice:pw@host/x", "https://host/x"),
        ("key sk-abcdefgh12345678", "key sk-***"),
        ("alice/data/train.jsonl.gz", "train.jsonl.gz"),
        ("alice/rewards.py:score", "rewards.py:score"),
        ("hf:/srv/alice/data", "hf:data"),
        ("https://host/a/b", "https://host/a/b"),
        ("org/model", "org/model"),
        ("hf:org/data:train", "hf:org/data:train"),
        ("synth:house:24", "synth:house:24"),
        (r"^\d+/\d+$", r"^\d+/\d+$"),
    ],
)
def test_public_text(text, public):
    assert public_text(text) == public


def test_equal_runs_have_equal_cards(lora_run, tiny_directory, tmp_path):
    sections = {"data": {"test": "synth:house-test:4"}, "eval": {"generate": True, "max_new_tokens": 4}}
    again = whet.train(run_config(tiny_directory, tmp_path, **sections), verbose=0)
    ours, theirs = ((run.directory / "final" / "README.md").read_bytes() for run in (lora_run, again))
    assert ours == theirs


def test_run_that_was_killed_before_its_card_gets_the_same_one(tiny_directory, tmp_path):
    directory = whet.train(run_config(tiny_directory, tmp_path, checkpoint={"every": 2}), verbose=0).directory
    card = directory / "final" / "README.md"
    expected = card.read_bytes()
    rows = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_text("".join(rows[:-1]))  # without the summary
    card.unlink()
    whet.resume(directory, verbose=0)
    assert card.read_bytes() == expected


def test_markdown_in_names_is_escaped(lora_run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(lora_run.directory, copy)
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(text.replace("name: test", "name: '<script>alert(1)</script> | ```'"))
    refresh_final_card(copy)
    card = card_of(copy / "final")
    body = card.text.partition("<details>")[0]
    assert "<script>" not in body
    assert "````yaml" in card.text, "the fence of the config is longer than any in it"


# --- examples and exports


def run_examples(directory, base, capsys):
    text = (directory / "README.md").read_text()
    for block in python_blocks(text):
        code = block.replace(PLACEHOLDER, str(directory)).replace(BASE_PLACEHOLDER, str(base))
        exec(compile(code.replace("=64", "=4"), "example", "exec"), {})
        assert capsys.readouterr().out.endswith("\n")
    return len(python_blocks(text))


def test_examples_of_cards_run(lora_run, full_run, tiny_directory, tmp_path, capsys):
    assert run_examples(lora_run.directory / "final", tiny_directory, capsys) == 2
    assert run_examples(full_run.directory / "final", tiny_directory, capsys) == 2
    exported = whet.export(lora_run.directory, output=tmp_path / "hf")
    card = card_of(exported)
    assert (card.data.library_name, "fine-tuned from" in card.text) == ("transformers", True)
    assert metrics_of(card) == metrics_of(card_of(lora_run.directory / "final"))
    assert run_examples(exported, tiny_directory, capsys) == 2


def test_examples_of_a_classifier_run(tiny_directory, tmp_path, capsys):
    rows = [{"input": f"{n} apples", "label": "ab"[n % 2]} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = str(tmp_path / "rows.jsonl")
    config = run_config(
        tiny_directory,
        tmp_path,
        objective={"kind": "classify", "classes": ["a", "b"]},
        data={"train": source, "valid": source, "max_length": 64},
    )
    result = whet.train(config, verbose=0)
    card = card_of(result.directory / "final")
    assert (card.data.pipeline_tag, card.data.metrics) == ("text-classification", ["accuracy", "f1", "mcc"])
    assert run_examples(result.directory / "final", tiny_directory, capsys) == 1
    exported = whet.export(result.directory, output=tmp_path / "hf")
    assert run_examples(exported, tiny_directory, capsys) == 2


def test_card_of_an_exported_checkpoint_has_the_metrics_of_its_step(tiny_directory, tmp_path):
    config = run_config(tiny_directory, tmp_path, eval={"every": 1}, checkpoint={"every": 2, "keep": 9})
    result = whet.train(config, verbose=0)
    checkpoint = result.directory / "checkpoints" / "step-000002"
    card = card_of(whet.export(checkpoint, output=tmp_path / "hf"))
    rows = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    [expected] = [row["eval_loss"] for row in rows if row.get("step") == 2 and "eval_loss" in row]
    assert metrics_of(card)["validation split", "loss"] == pytest.approx(expected, rel=1e-5)
    assert "| steps | 2 |" in card.text


@pytest.mark.parametrize(
    "text", ["", "- 1", "a: [", "run: 3\nmethod: x\ndata: []\nobjective: {parts: [1]}\n"]
)
def test_card_of_a_damaged_run(lora_run, tmp_path, text):
    copy = tmp_path / "run"
    shutil.copytree(lora_run.directory, copy)
    (copy / "config.yaml").write_text(text)
    (copy / "provenance.json").write_text("[1]")
    (copy / "metrics.jsonl").write_text("x\n")
    (copy / "evaluations.jsonl").write_text('{"task": 1}\n{"task": "a", "scores": {"b": 2, "c": {}}}\n[]\n')
    refresh_final_card(copy)
    assert card_of(copy / "final").data.library_name == "peft"


def test_results_of_a_run_are_not_those_of_its_quantized_weights(full_run, tmp_path):
    directory = tmp_path / "quantized"
    shutil.copytree(full_run.directory / "final", directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": {}}))
    write_export_card(full_run.directory, directory)
    card = card_of(directory)
    assert not card.data.eval_results
    assert "## Evaluation before quantization" in card.text


def test_export_keeps_an_edited_card(lora_run, tmp_path):
    directory = whet.export(lora_run.directory, output=tmp_path / "hf")
    (directory / "README.md").write_text("mine")
    write_export_card(lora_run.directory, directory)
    assert (directory / "README.md").read_text() == "mine"


def test_tokenizer_and_chat_template_are_complete(lora_run, full_run, tiny_directory, tmp_path):
    expected = AutoTokenizer.from_pretrained(tiny_directory)
    messages = [{"role": "user", "content": "hi"}]
    exports = [whet.export(lora_run.directory, to=to, output=tmp_path / to) for to in ("hf", "peft", "mlx")]
    for directory in (lora_run.directory / "final", full_run.directory / "final", *exports):
        tokenizer = AutoTokenizer.from_pretrained(directory)
        assert tokenizer.special_tokens_map == expected.special_tokens_map
        assert tokenizer.all_special_ids == expected.all_special_ids
        assert tokenizer.apply_chat_template(messages) == expected.apply_chat_template(messages)
