"""`whet data` and `whet train --dry-run`: their output, the problems they report, and that they write nothing."""

import importlib.util
import io
import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from tokenizers.processors import TemplateProcessing
from torch import get_default_device
from transformers import AutoTokenizer

from tiny import run_config, write_tiny_model, write_tokenizer
from whet.config.load_config import load_config
from whet.models.decoder import Decoder
from whet.reporting.data.data_text import DataText
from whet.runs.inspect_data import view_data


def chat(user, assistant):
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]}


GOOD = [chat(f"question {n}", f"answer {n}") for n in range(40)]


@pytest.fixture
def config(tiny_directory, tmp_path):
    """Writes records and a config that reads them; returns the path of the config."""

    def write(train=GOOD, valid=None, *, model=None, **sections):
        data = {"valid": None, **sections.pop("data", {})}
        for name, records in (("train", train), ("valid", valid)):
            if records is not None:
                path = tmp_path / f"{name}.jsonl"
                lines = (each if isinstance(each, str) else json.dumps(each) for each in records)
                path.write_text("".join(line + "\n" for line in lines))
                data[name] = str(path)
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(run_config(model or tiny_directory, tmp_path, data=data, **sections)))
        return path

    return write


def test_data_brackets_supervised_tokens_without_color(cli, config):
    code, out, err = cli("data", config(valid=[chat("other", "one")]), "--samples", 1)
    assert code == 0
    assert "⟨|user|⟩question 0⟨|end|⟩⟨|assistant|⟩⟦answer 0⟨|end|⟩⟧" in out
    assert "⟨|user|⟩other⟨|end|⟩⟨|assistant|⟩⟦one⟨|end|⟩⟧" in out
    assert "question 1⟨" not in out
    for expected in (
        "vocabulary 260",
        "sha256",
        "is supervised in 40 of 40 examples",
        "10 steps",
        "duplicates     none",
        "████",
    ):
        assert expected in out
    assert "no problems" in out
    assert "\x1b" not in out + err
    assert "Traceback" not in err


def test_data_counts_record_formats(cli, config, monkeypatch):
    records = [
        chat("a", "b"),
        {"prompt": "a", "completion": "b"},
        {"text": "abc"},
        {"instruction": "a", "output": "b"},
    ]
    path = config(records)
    _, out, _ = cli("data", path)
    shapes = (
        "1 messages, with the chat template; 2 completion, with the chat template; "
        "1 text, without a chat template"
    )
    assert f"4 ({shapes})" in out
    monkeypatch.setattr("whet.data.inspect.data_facts.MAX_COUNTED_FORMATS", 2)
    monkeypatch.setattr("whet.reporting.data.data_wording.MAX_COUNTED_FORMATS", 2)
    _, out, _ = cli("data", path)
    assert "; 1 completion, with the chat template; of the first 2)" in out
    _, out, _ = cli("data", config())
    assert "40 (messages, with the chat template)" in out


def test_brackets_close_on_the_same_line(cli, config):
    _, out, _ = cli("data", config([chat("a", "one\ntwo\n"), chat("b", "c")]))
    assert "⟦one↵\n    two↵\n    ⟨|end|⟩⟧" in out
    _, out, _ = cli("data", config([{"text": "ab\n"}, chat("b", "c")]), "data.supervise=all", "--samples", 1)
    assert "a⟦b↵\n    ⟨|end|⟩⟧" in out


def test_terminal_output_has_colors_and_no_brackets(config):
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, color_system="standard", markup=False, soft_wrap=True)
    DataText(console).show(view_data(load_config(config())))
    assert "\x1b[1;32ma" in shown.getvalue()  # supervised
    assert "\x1b[35m⟨|user|⟩" in shown.getvalue()
    assert "⟦" not in shown.getvalue()


def test_control_characters_in_records_are_escaped(cli, config):
    hostile = chat("\x1b]0;owned\x07\x1b[2J \u202egnp.exe", "[bold red]:smile: yes")
    _, out, _ = cli("data", config([hostile, *GOOD]))
    assert "\x1b" not in out
    assert "␛]0;owned␇␛[2J" in out
    assert "⟨U+202E⟩gnp.exe" in out
    assert "⟦[bold red]:smile: yes" in out


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_data_output_can_be_piped_in_any_encoding(config, encoding):
    command = [sys.executable, "-c", "from whet.cli.app import main; main()", "data", str(config())]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    process = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert process.returncode == 0, process.stderr
    assert b"answer 0" in process.stdout
    assert b"\x1b" not in process.stdout


class Page(HTMLParser):
    """Checks that tags are closed in order, and keeps what the page says and asks for."""

    void = ("meta", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.attributes, self.tags = [], [], [], set()
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_data_page_is_complete_and_self_contained(cli, config, tmp_path):
    code, _, _ = cli("data", config(valid=GOOD[:1]), "--html", tmp_path / "data.html")
    assert code == 0
    source = (tmp_path / "data.html").read_text()
    page = Page(source)
    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "object", "base", "form"})
    names = {name for name, _ in page.attributes}
    assert names.isdisjoint({"src", "href", "srcset", "action"})
    assert not any(name.startswith("on") for name in names)
    assert "http:" not in source
    assert "https:" not in source
    assert "url(" not in source
    assert "default-src 'none'" in source
    assert "prefers-color-scheme: dark" in source
    text = "".join(page.text)
    for expected in ("⟨|user|⟩question 0⟨|end|⟩", "padding", "also in train", "{% for m in messages %}"):
        assert expected in text
    supervised = {
        "class": "l",
        "title": str(AutoTokenizer.from_pretrained(load_config(config()).model)("a").input_ids[0]),
    }
    assert set(supervised.items()) <= set(page.attributes)


def test_data_page_escapes_text(cli, config, tmp_path):
    attack = "<script>alert(1)</script><img src=x onerror='alert(1)'>\"'&amp;</pre></style>"
    write_tiny_model(tmp_path / "model", vocab_size=262)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.add_tokens(["<script>", "<img src=x onerror='alert(1)'>"])  # an attack may be one token
    tokenizer.save_pretrained(tmp_path / "model")
    path = tmp_path / "a' onclick='alert(1)'\"><b>.jsonl"
    path.write_text("\n".join([json.dumps(chat(attack, attack)), json.dumps({attack: 1})]))
    overrides = [f"data.{split}={json.dumps(str(path))}" for split in ("train", "valid")]
    code, _, _ = cli("data", config(model=tmp_path / "model"), *overrides, "--html", tmp_path / "data.html")
    assert code == 0
    page = Page((tmp_path / "data.html").read_text())
    assert page.tags.isdisjoint({"script", "img"})
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert "".join(page.text).count("<script>alert(1)</script>") >= 2
    assert any("a' onclick='alert(1)'\"><b>.jsonl" in text for text in page.text)
    assert any("><b>.jsonl" in value for name, value in page.attributes if name == "title")


def test_unwritable_data_page_is_an_error(cli, config, tmp_path):
    code, _, err = cli("data", config(), "--html", tmp_path / "nowhere" / "data.html")
    assert code == 2
    assert "data.html could not be written: No such file" in err


def with_bos(directory):
    """The tiny tokenizer, with a BOS that it writes in front of plain texts."""
    write_tiny_model(directory, vocab_size=261)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(directory)
    return directory


def no_answer(n):
    return {"messages": [{"role": "user", "content": f"and {n}?"}]}


def rewriting(directory):
    """A model whose template drops earlier answers, as some that think do."""
    write_tiny_model(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>"
        "{% if m['role'] != 'assistant' or loop.last %}{{ m['content'] }}{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer.save_pretrained(directory)
    return directory


def another_end(directory):
    """A model whose template never writes the token that ends an answer."""
    write_tiny_model(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|end|>", "<|system|>")
    tokenizer.save_pretrained(directory)
    return directory


TURNS = {"messages": GOOD[0]["messages"] + GOOD[1]["messages"]}
LONG = [chat("q", "a" * 200 + str(n)) for n in range(5)]

PROBLEMS = {
    "no answer": ({"train": [*GOOD, no_answer(1)]}, [], "train.jsonl:41: no token of this example is superv"),
    "bad JSON": ({"train": [*GOOD, "{"]}, [], "train.jsonl:41: not valid JSON"),
    "bad shape": ({"train": [*GOOD, {"x": 1}]}, [], "train.jsonl:41: a record with the fields 'x' matches no known record format"),
    "BOS twice": ({"train": [*GOOD, {"text": "<s>hello"}], "model": with_bos}, [], "1 record with a duplicate BOS token"),
    "no end": ({"model": another_end}, [], "no example teaches the model to stop: ⟨|end|⟩ is never supervised"),
    "ends cut off": ({"train": LONG}, ["data.max_length=100"], "no example teaches the model to stop"),
    "truncated": ({"train": GOOD + LONG}, ["data.max_length=100"], "11% of the records are truncated or dropped"),
    "dropped": ({"train": GOOD + LONG}, ["data.max_length=100", "data.too_long=drop"], "11% of the records are truncated or dropped"),
    "refused": ({"train": GOOD + LONG}, ["data.max_length=100", "data.too_long=error"], "5 records longer than"),
    "leak": ({"valid": [GOOD[7]]}, [], "valid: 1 record also in train"),
    "duplicates": ({"train": GOOD + GOOD[:3]}, [], "7% of the records are duplicates"),
    "vocabulary": ({"model": lambda d: write_tiny_model(d, vocab_size=258) or d}, [], "is outside the model's vocabulary of 258"),
    "context": ({"model": lambda d: write_tiny_model(d, max_position_embeddings=16) or d}, [], "tokens exceed the 16 positions of"),
    "only last": ({"train": [*GOOD, TURNS], "model": rewriting}, ["data.turns=last"], "the chat template rewrites earlier turns of 1 conversation"),
    "step": ({}, ["run.micro_batch_tokens=16"], "do not fit run.micro_batch_tokens=16"),
    "missing": ({}, ["data.valid=nowhere.jsonl"], "data.valid: nowhere.jsonl does not exist"),
    "empty": ({"valid": []}, [], "valid.jsonl contains no records"),
    "order": ({}, ["data.order=mlx"], "data.order: mlx needs run.batch_size and data.pack: false"),
    "no train": ({}, ["data.train=nowhere.jsonl"], "data.train: nowhere.jsonl does not exist"),
}  # fmt: skip

STOPPING = {
    "no answer", "bad JSON", "bad shape", "refused", "vocabulary", "context", "step", "missing", "empty", "order", "no train",
}  # fmt: skip


@pytest.mark.parametrize("name", ["no end", "ends cut off", None])
def test_train_warns_if_no_example_has_an_end_token(cli, config, tmp_path, name):
    given, overrides, _ = PROBLEMS.get(name, ({}, [], ""))
    given = {**given, "model": given["model"](tmp_path / "model")} if "model" in given else given
    code, _, err = cli("train", config(**given), *overrides, "run.steps=1", "run.batch_size=2")
    assert code == 0
    warnings = [
        line for line in err.splitlines() if "teaches the model to stop: <|end|> is never supervised" in line
    ]
    assert len(warnings) == (name is not None)


@pytest.mark.parametrize("name", PROBLEMS)
def test_data_check_finds_problem_and_exits_2(cli, config, tmp_path, name):
    given, overrides, message = PROBLEMS[name]
    given = dict(given)
    if "model" in given:
        given["model"] = given["model"](tmp_path / "model")
    path = config(**given)
    code, out, err = cli("data", path, *overrides, "--check")
    assert message in out
    assert code == 2
    kind = "error" if name in STOPPING else "warning"
    assert f"  {kind}: " in out
    code, out, _ = cli("data", path, *overrides)
    assert (code, message in out) == (0, True)
    # and a dry run says beforehand whether the run would start
    code, out, _ = cli("train", path, *overrides, "--dry-run")
    assert message in out
    assert code == (2 if name in STOPPING else 0)
    assert "Traceback" not in err


def test_no_tokenizer_is_trained_without_valid_records(cli, config):
    path = config(["{", "["])
    given = yaml.safe_load(path.read_text()) | {
        "model": {"preset": "nano", "tokenizer": "chars"},
        "method": {"kind": "full"},
    }
    path.write_text(yaml.safe_dump(given))
    code, out, _ = cli("data", path, "--check")
    assert code == 2
    assert "all 2 records are bad; the first error: " in out
    assert "train.jsonl:1: not valid JSON" in out


def test_dry_run_errors_match_run_errors(cli, config, tmp_path):
    for name in sorted(STOPPING):
        given, overrides, _ = PROBLEMS[name]
        given = dict(given)
        if "model" in given:
            given["model"] = given["model"](tmp_path / name)
        code, _, _ = cli("train", config(**given), *overrides)
        assert code == 2, name


def test_data_check_exits_0_without_problems(cli, config):
    assert cli("data", config(valid=[chat("other", "one")]), "--check")[0] == 0


def test_data_check_lists_all_problems(cli, config):
    bad = [no_answer(n) for n in range(130)]
    path = config([*GOOD[:5], "{", {"x": 1}, *GOOD, *bad], valid=[GOOD[0], "["])
    code, out, _ = cli("data", path, "--check")
    assert code == 2
    for expected in (
        "train: 132 bad records",
        "train.jsonl:6: not valid JSON",
        "train.jsonl:7: a record with the fields",
        "train.jsonl:48: no token",
        "train.jsonl:49: no token",
        "and 32 more",
        "valid: 1 bad record",
        "valid.jsonl:2: not valid JSON",
        "of the records are duplicates",
        "valid: 1 record also in train",
    ):
        assert expected in out
    assert "4 problems" in out
    _, out, _ = cli("data", path)
    assert "train.jsonl:51: no token" not in out
    assert "(whet data --check lists all)" in out


def test_skipped_records_are_warnings(cli, config):
    path = config([*GOOD, "{"])
    assert cli("data", path, "data.on_bad_record=skip", "--check")[0] == 2
    assert cli("train", path, "data.on_bad_record=skip", "--dry-run")[0] == 0


@pytest.fixture
def no_weights(monkeypatch):
    """A world in which no model can be read, nor built but on the meta device."""
    build = Decoder.__init__

    def fail(*_, **__):
        raise AssertionError("a model was built")

    for name in ("whet.model_io.load.load_model", "whet.model_io.load.load_parameters"):
        monkeypatch.setattr(name, fail)
    monkeypatch.setattr(
        Decoder,
        "__init__",
        lambda *given, **named: build(*given, **named) if get_default_device().type == "meta" else fail(),
    )


@pytest.mark.usefixtures("no_weights")
def test_dry_run_prints_the_plan_and_writes_nothing(cli, config, tmp_path):
    path = config(valid=[chat("other", "one")])
    before = sorted(tmp_path.rglob("*"))
    code, out, err = cli("train", path, "--dry-run", "run.steps=20")
    assert code == 0, err
    for expected in (
        "20 of at most 4 examples: 2 epochs",
        "10 steps",
        "4.0 examples",
        "train.jsonl",
        "valid.jsonl",
    ):
        assert expected in out
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("no_weights")
def test_data_and_dry_run_build_no_model(cli, config, tmp_path):
    path = config([{"text": "one two three four"}] * 2)
    given = yaml.safe_load(path.read_text()) | {
        "model": {"preset": "nano", "tokenizer": "chars"},
        "method": {"kind": "full"},
    }
    path.write_text(yaml.safe_dump(given))
    assert cli("train", path, "--dry-run")[0] == 0
    code, out, _ = cli("data", path)
    assert code == 0
    assert "nano from scratch" in out
    assert not (tmp_path / "runs").exists()


def test_dry_run_reports_existing_run(cli, config, tmp_path):
    (tmp_path / "runs" / "test").mkdir(parents=True)
    (tmp_path / "runs" / "test" / "config.yaml").write_text("x")
    code, out, _ = cli("train", config(), "--dry-run")
    assert code == 2
    assert "runs/test already exists, and existing runs are never overwritten" in out


def test_preset_is_named_when_records_are_missing(cli, config, tmp_path):
    path = config(method={"kind": "full"}, data={"train": str(tmp_path / "none.jsonl")}, train=None)
    code, out, _ = cli("train", path, "model={preset: nano}", "--dry-run")
    assert code == 2
    assert out.splitlines()[0].split() == ["model", "nano", "from", "scratch"]


def test_data_rejects_invalid_configs_and_models(cli, config):
    for override, message in (("data.trainn=1", "unknown key"), ("model=no-such-model", "no-such-model")):
        code, out, err = cli("data", config(), override)
        assert (code, out) == (2, "")
        assert message in err


def test_data_rejects_tokenizer_without_model(cli, config, tmp_path):
    write_tokenizer(tmp_path / "bare")
    code, _, err = cli("data", config(model=tmp_path / "bare"))
    assert code == 2
    assert "config.json" in err
    assert Path(tmp_path / "bare").is_dir()


def test_data_shows_every_part_of_a_mix(cli, config, tmp_path):
    pair = {"prompt": "dim it", "chosen": "Done.", "rejected": "No."}
    (tmp_path / "pairs.jsonl").write_text(
        "".join(json.dumps({**pair, "prompt": f"dim it {n}"}) + "\n" for n in range(8))
    )
    path = config()
    values = yaml.safe_load(path.read_text())
    sft_data, pairs = values.pop("data"), {"train": str(tmp_path / "pairs.jsonl"), "max_length": 256}
    values["objective"] = {
        "kind": "mix",
        "parts": [
            {"objective": {"kind": "sft"}, "data": sft_data},
            {"objective": {"kind": "dpo"}, "data": pairs, "batch_size": 2},
        ],
    }
    path.write_text(yaml.safe_dump(values))
    code, out, _ = cli("data", path, "--html", tmp_path / "page.html")
    assert code == 0
    assert out.index("part sft") < out.index("⟦answer 0") < out.index("part dpo") < out.index("⟦Done.")
    assert "part sft" in (tmp_path / "page-sft.html").read_text()
    assert "part dpo" in (tmp_path / "page-dpo.html").read_text()
    code, out, _ = cli("train", path, "--dry-run")
    assert code == 0
    assert out.index("part sft") < out.index("part dpo")
    code, out, _ = cli("train", path)
    assert code == 0, out
    (tmp_path / "pairs.jsonl").write_text(json.dumps({**pair, "rejected": "Done."}) + "\n")
    code, out, _ = cli("train", path, "--dry-run")
    assert code == 2
    assert "pairs.jsonl:1: chosen and rejected are the same" in out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.schedule=[{kind: constant, steps: 100}, {kind: cosine}]", "optim.schedule"),
        ("run.device=foo", "foo"),
        ("log.sinks=[wandb]", "wandb"),
        ("run.dir=/dev/null/runs", "/dev/null"),
        ("run.fp8=true", "run.fp8 trains all weights, so it needs method.kind: full"),
    ],
)
def test_dry_run_reports_errors_of_the_run(cli, config, override, message, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name))
    for arguments in (("--dry-run",), ()):
        code, out, err = cli("train", config(), override, *arguments)
        assert code == 2, out + err
        assert message in out + err


def test_score_distrust_and_train(cli, tiny_directory, tmp_path):
    """Beside `whet data CONFIG`, which keeps working."""
    rows = [
        {"text": f"{word} wrote of the harvest in letters that nobody has printed until today.", "year": year}
        for word, year in (("Anna", 1850), ("Bert", 1980), ("Carl", 2020))
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, err = cli("data", "score-distrust", source, target)
    assert (code, "3 records scored" in out) == (0, True), err
    assert "warning: 3 records without a source_type" in err
    config = tmp_path / "config.yaml"
    settings = run_config(tiny_directory, tmp_path, objective={"kind": "distrust"})
    settings["data"] = {"train": str(target), "max_length": 256}
    config.write_text(yaml.safe_dump(settings))
    code, out, err = cli("data", config)
    assert (code, "is not tokenized" in out) == (0, False), "the year was read by the scorer"
    code, out, err = cli("train", config, "run.steps=2")
    assert (code, "is not tokenized" in err) == (0, False), err
    code, out, err = cli("data", "score-distrust", source, target)
    assert (code, out) == (2, "")
    assert "out.jsonl already exists" in err
    code, out, err = cli("data", "score-distrust", target, tmp_path / "again.jsonl")
    assert (code, "out.jsonl:1: the record already has auth_weight and prov_entropy" in err) == (2, True)
    code, out, err = cli(
        "data", "score-distrust", target, tmp_path / "again.jsonl", "--existing", "overwrite"
    )
    assert code == 0, err
    assert (tmp_path / "again.jsonl").read_bytes() == target.read_bytes()


def test_unread_record_field_is_a_problem_and_a_warning(cli, config):
    records = [{**each, "id": number, "topic": "sums"} for number, each in enumerate(GOOD)]
    path = config(records)
    for extra in ((), ("--check",)):
        code, out, _ = cli("data", path, *extra)
        assert code == (2 if extra else 0)
        assert "warning: train: field id of 40 records is not tokenized" in out
        assert "warning: train: field topic of 40 records is not tokenized" in out
        assert "hint: no component reads this field; set data.ignore to [id]" in out
    code, out, err = cli("train", path)
    assert code == 0
    assert "warning: train: field id of 40 records is not tokenized: no component reads" in err
    code, out, err = cli("data", path, "--check", "data.ignore=[id, topic]")
    assert (code, "no problems" in out) == (0, True)


def test_table_with_unknown_columns_gets_rename_hint(cli, config, tmp_path):
    (tmp_path / "qa.csv").write_text("question,answer\n" + "what?,that\n" * 160)
    path = config()
    for command in (("data", path, "--check"), ("train", path)):
        code, out, err = cli(*command, f"data.train={tmp_path / 'qa.csv'}")
        assert code == 2
        assert (
            "qa.csv:2: a record with the fields 'question', 'answer' matches no known record format"
            in out + err
        )
        assert "hint: set data.columns: {prompt: question, completion: answer}" in out + err
    mixed = [*GOOD, {"question": "a", "answer": "b"}]
    _, out, _ = cli("data", config(mixed), "--check")
    assert "error: train: 1 bad record" in out
    assert "hint: set data.columns: {prompt: question, completion: answer}" in out


def test_columns_that_the_run_reads_are_not_reported(cli, config):
    distrusted = [{"text": f"text {n}", "auth_weight": 0.5, "prov_entropy": n / 9} for n in range(40)]
    path = config(distrusted)
    code, out, _ = cli("data", path, "--check", "objective={kind: distrust}")
    assert (code, "no problems" in out) == (0, True)
    code, out, _ = cli("data", path, "--check")
    assert code == 2
    assert "field auth_weight of 40 records is not tokenized" in out
    graded = [{**each, "grade": number, "group": "a"} for number, each in enumerate(GOOD)]
    path = config(graded, valid=[{**chat("x", "y"), "grade": 1}])
    code, out, _ = cli("data", path, "--check", "data.curriculum={kind: difficulty, score: grade}")
    assert (code, "no problems" in out) == (0, True)


def test_dropped_tool_calls_are_reported(cli, config):
    """Its answers are empty, its tools are not read: the model would be taught to say nothing."""
    call = {"type": "function", "function": {"name": "light", "arguments": {"on": True}}}
    asked, answered = chat("on", "")["messages"]
    called = {"messages": [asked, {**answered, "tool_calls": [call]}], "tools": [call]}
    path = config([called] * 3 + GOOD)
    code, out, _ = cli("data", path, "--check")
    assert code == 2
    assert "error: train: 3 bad records" in out
    assert (
        "train.jsonl:1: message 2 (assistant) renders as empty text: the chat template omits tool_calls"
        in out
    )
    assert "warning: train: field tools of 3 records is not tokenized" in out
    assert "warning: train: message field tool_calls of 3 records is not tokenized" in out
    code, _, err = cli("train", path)
    assert code == 2
    assert "train.jsonl:1: message 2 (assistant) renders as empty text" in err


def test_json_is_the_only_output(cli, config):
    path = config([*GOOD, GOOD[0]])
    code, out, _ = cli("data", path, "--json", "--samples", 1, "--device", "h100")
    result = json.loads(out)
    assert code == 0
    assert [split["name"] for split in result["splits"]] == ["train"]
    assert result["cost"]["epoch_s"] == result["cost"]["step_s"] * result["steps"]["steps_per_epoch"] > 0
    _, text, _ = cli("data", path, "--samples", 1, "--device", "h100")
    assert "s per step" in text
    assert "on h100, at 40% of peak FLOP/s" in text


def test_json_with_check_exits_with_problems(cli, config):
    code, out, _ = cli("data", config([*GOOD, "not json"]), "--json", "--check")
    assert code == 2
    [problem] = [each for each in json.loads(out)["problems"] if each["kind"] == "error"]
    assert "1 bad record" in problem["message"]
    assert "train.jsonl:41" in problem["details"][0]


def test_unknown_device_is_reported_first(cli, config):
    code, out, err = cli("data", config(), "--device", "h1000")
    assert (code, out) == (2, "")
    assert "did you mean h100" in err
