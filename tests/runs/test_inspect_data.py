"""The facts of `whet data`, each against an independent count."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tiny import run_config, write_tokenizer
from whet.config.load_config import validate_config
from whet.data.inspect.data_facts import histogram
from whet.data.inspect.problems import find_problems
from whet.data.inspect.token_text import TokenText, to_visible_text
from whet.data.run_data import Needs, RunData
from whet.models.from_scratch.train_tokenizer import byte_tokenizer
from whet.reporting.data.data_wording import step_rows
from whet.runs.inspect_data import view_data


def chat(user, assistant):
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]}


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def look(tiny_directory, tmp_path):
    """Return a function that views records, with some keys of the data and run sections replaced."""

    def view(records=None, *, run=None, samples=2, model=None, **data):
        if records is not None:
            data = {"train": write(tmp_path / "train.jsonl", records), "valid": None, **data}
        config = run_config(tiny_directory, tmp_path, data=data, run=run or {}, method={"kind": "full"})
        return view_data(validate_config(config | ({"model": model} if model else {})), samples=samples)

    return view


RECORDS = [chat("ab" * n, "xyz" * (n + 1)) for n in range(30)]


def test_counts_and_lengths_match_the_chat_template(look, tiny_directory):
    view = look(RECORDS)
    [train] = view.splits
    tokenizer = AutoTokenizer.from_pretrained(tiny_directory)
    sizes = sorted(
        len(tokenizer.apply_chat_template(record["messages"], tokenize=True, return_dict=False))
        for record in RECORDS
    )
    assert (train.records, train.examples, train.tokens) == (30, 30, sum(sizes))
    assert train.lengths == (sizes[0], sizes[14], sizes[28], sizes[29])
    # an answer is its bytes and the token that ends it
    assert train.supervised == sum(3 * (n + 1) + 1 for n in range(30))
    assert sum(each.count for each in train.bins) == 30
    assert train.record_formats == {"messages": 30}
    assert train.with_supervised_end == 30
    assert view.tokenizer.end_tokens == ("⟨|end|⟩",)
    assert not find_problems(view)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("step", [{"batch_size": 4}, {"batch_size": None, "batch_tokens": 700}])
def test_step_plan_matches_the_batch_stream(look, tiny_directory, tmp_path, pack, step):
    run = {"steps": 40, "micro_batch_tokens": 300, **step}
    plan = look(RECORDS, pack=pack, run=run).steps
    keys = {"train": str(tmp_path / "train.jsonl"), "valid": None, "pack": pack}
    data = RunData(validate_config(run_config(tiny_directory, tmp_path, data=keys, run=run)), Needs())
    data.prepare(AutoTokenizer.from_pretrained(tiny_directory))
    stream = data.stream()
    steps = []
    while stream.epoch == 0:
        steps.append(next(stream))
    batches = [batch for step in steps for batch in step]
    real = sum(batch.real_tokens for batch in batches)
    assert (plan.steps, plan.steps_per_epoch, plan.measured) == (40, len(steps), len(steps))
    assert plan.epochs == 40 / len(steps)
    assert plan.examples_per_step == 30 / len(steps)
    assert plan.tokens_per_step == pytest.approx(real / len(steps))
    assert plan.micro_batches == len(batches) / len(steps)
    assert plan.efficiency == pytest.approx(real / sum(batch.tokens.numel() for batch in batches))
    assert plan.micro_batch_fill == pytest.approx(real / (300 * len(batches)))
    first = steps[0][0]
    assert plan.rows == len(first.tokens)
    learned = []
    for row in plan.displayed_rows:
        stretches = [stretch for document in row.documents for stretch in document.runs]
        learned.append([mark for length, mark in [*stretches, (row.padding, False)] for _ in range(length)])
    assert learned == (first.targets != -100).tolist()


def test_epochs_are_converted_to_steps(look):
    plan = look(RECORDS, run={"steps": None, "epochs": 3}).steps
    assert (plan.steps, plan.steps_per_epoch, plan.epochs) == (24, 8, 3)


def test_measurement_of_a_large_data_set_is_sampled(look, monkeypatch):
    monkeypatch.setattr("whet.data.inspect.step_facts.MEASURED_EXAMPLES", 10)
    plan = look(RECORDS).steps
    assert (plan.measured, plan.steps_per_epoch) == (3, 8)


def test_too_long_records_are_counted(look):
    truncated = look(RECORDS, max_length=60).splits[0]
    assert truncated.shortened["truncated"] + truncated.shortened["dropped"] == sum(
        len("ab" * n) + len("xyz" * (n + 1)) + 4 > 60 for n in range(30)
    )
    assert truncated.lengths[3] == 58 + 90 + 4  # lengths are those before the cut
    # only the answers that are whole end
    assert (
        truncated.with_supervised_end
        == 30 - truncated.shortened["truncated"] - truncated.shortened["dropped"]
    )
    split = look(RECORDS, max_length=60, too_long="split").splits[0]
    assert split.examples > 30
    assert split.with_supervised_end == 30


def test_duplicates_are_counted_with_an_example_pair(look, tmp_path):
    view = look([chat("a", "1"), chat("b", "2"), chat("a", "1"), chat("c", "3"), chat("a", "1")])
    twins = view.splits[0].duplicates
    assert twins.count == 2
    assert twins.pair == (f"{tmp_path}/train.jsonl:1", f"{tmp_path}/train.jsonl:3")


def test_repeats_from_mixture_weights_are_not_duplicates(look, tmp_path):
    small = write(tmp_path / "small.jsonl", [chat("a", "1"), chat("b", "2")])
    mixture = [{"source": small, "weight": 1}, {"source": "synth:house:20", "weight": 1}]
    view = look(train=mixture, valid=None)
    assert view.splits[0].records == 40
    assert view.splits[0].duplicates.count == 0


def test_overlap_of_train_and_held_out_records_is_reported(look, tmp_path):
    held_out = write(tmp_path / "held.jsonl", [chat("new", "1"), RECORDS[3], RECORDS[5]])
    view = look(RECORDS, valid=held_out, test="synth:house-test:5")
    actual = {
        (overlap.held_out_split, overlap.training_split): overlap.duplicates for overlap in view.overlaps
    }
    assert actual["valid", "train"].count == 2
    assert actual["valid", "train"].pair == (f"{held_out}:2", f"{tmp_path}/train.jsonl:4")
    assert actual["test", "train"].count == 0


def test_hard_records_of_a_curriculum_are_a_separate_split(look, tmp_path):
    hard = write(tmp_path / "hard.jsonl", [chat("why", "because " * n) for n in range(8)])
    held_out = write(tmp_path / "held.jsonl", [chat("why", "because " * 2)])
    view = look(RECORDS, valid=held_out, curriculum={"kind": "difficulty", "hard": hard})
    assert [split.name for split in view.splits] == ["train", "valid", "hard"]
    assert {
        (overlap.held_out_split, overlap.training_split): overlap.duplicates.count
        for overlap in view.overlaps
    } == {
        ("valid", "train"): 0,
        ("valid", "hard"): 1,
    }
    assert view.steps.has_curriculum


def test_samples_show_the_first_examples_token_by_token(look, tiny_directory):
    view = look([chat("Hi\nthere", "Yes.")], samples=3)
    [sample] = view.splits[0].samples
    tokenizer = AutoTokenizer.from_pretrained(tiny_directory)
    ids = [token for piece in sample.head for token in piece.ids]
    assert tokenizer.decode(ids) == "<|user|>Hi\nthere<|end|><|assistant|>Yes.<|end|>"
    assert "".join(piece.text for piece in sample.head if piece.supervised) == "Yes.⟨|end|⟩"
    assert [piece.text for piece in sample.head if piece.special] == [
        "⟨|user|⟩",
        "⟨|end|⟩",
        "⟨|assistant|⟩",
        "⟨|end|⟩",
    ]
    assert "↵\n" in [piece.text for piece in sample.head]
    assert sample.token_range == ""


def test_long_sample_is_truncated_in_the_middle(look):
    [sample] = look([chat("a", "b" * 600)], max_length=400).splits[0].samples
    shown = sum(len(piece.ids) for piece in (*sample.head, *sample.tail))
    assert (sample.tokens, shown + sample.omitted_tokens) == (400, 400)
    assert sample.omitted_tokens == 160
    assert sample.token_range == "tokens 1 to 400 of 605"


def test_first_token_of_an_example_is_not_supervised(look):
    [sample] = look([{"text": "abc"}]).splits[0].samples
    assert [piece.supervised for piece in sample.head] == [False, True, True, True]
    assert sample.supervised == 3


def test_preset_needs_no_model(look):
    view = look([{"text": "one two three " * 20}], model={"preset": "nano"}, too_long="split", max_length=64)
    assert view.model.vocab_size == 256
    assert view.model.max_positions == 512
    assert view.splits[0].tokens == 280 + view.splits[0].examples - 1  # windows share a token
    assert not find_problems(view)  # there is no EOS that could be missing


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=40))
def test_token_pieces_are_complete_and_spell_the_text(text):
    tokenizer = byte_tokenizer()
    ids = list(text.encode())
    pieces = TokenText(tokenizer).pieces(ids, [True] * len(ids))
    assert [token for piece in pieces for token in piece.ids] == ids
    shown = "".join(piece.text for piece in pieces)
    if "\ufffd" not in text:
        expected = "".join("↵\n" if char == "\n" else to_visible_text(char) for char in text)
        assert shown == expected
    # nothing that a terminal would obey or that turns the line around
    assert not any(char in shown for char in "\x1b\r\x07\x9b\u202e\u2028")


def test_combining_marks_and_special_tokens_end_a_piece(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("é<|end|>é", add_special_tokens=False)["input_ids"]
    pieces = TokenText(tokenizer).pieces(ids, [False] * len(ids))
    assert [piece.text for piece in pieces] == ["é", "⟨|end|⟩", "é"]
    # half of a character is learned: what is half shows as such
    assert len(TokenText(tokenizer).pieces(ids[:2], [False, True])) == 2


def test_leading_spaces_of_tokens_are_kept():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()  # takes the space in front of the first word away
    texts = ["the cat sat on the mat"] * 9
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(special_tokens=["<unk>", "</s>"]))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
    ids = fast("the cat sat</s> on the mat")["input_ids"]
    shown = [piece.text for piece in TokenText(fast).pieces(ids, [True] * len(ids))]
    assert shown == ["the", " cat", " sat", "⟨/s⟩", " on", " the", " mat"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(2, 10**6), min_size=1, max_size=50))
def test_histogram_counts_every_length_once(sizes):
    bins = histogram(np.array(sizes))
    assert sum(each.count for each in bins) == len(sizes)
    for each in bins:
        assert each.count == sum(each.low <= size <= each.high for size in sizes)
    assert len(bins) <= 21
    assert bins[0].high >= min(sizes)
    assert bins[-1].count


def test_grpo_prompts_are_counted_and_checked(tiny_directory, tmp_path):
    objective = {"kind": "grpo", "rewards": ["exact_match"], "max_new_tokens": 200, "group_size": 4}
    data = {"train": "synth:sums:20", "valid": "synth:sums-valid:5", "max_length": 256}
    config = run_config(tiny_directory, tmp_path, objective=objective, data=data)
    view = view_data(validate_config(config))
    assert not find_problems(view)
    assert [name for name, _ in view.prompts] == ["train", "valid"]
    rows = dict(step_rows(view))
    assert rows["train"].startswith("synth:sums:20: 20 prompts, length min/median/p95/max ")
    assert rows["per step"] == "4 prompts, 4 completions each"
    config["data"]["max_length"] = 204
    [problem] = find_problems(view_data(validate_config(config)))
    assert problem.is_fatal
    assert "and objective.max_new_tokens=200 exceed" in problem.message
