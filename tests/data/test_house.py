import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import whet
from whet.data.synthetic.generators import GENERATORS, generate
from whet.data.synthetic.house import (
    DELAYS,
    DEVICES,
    KNOWN_TEMPLATES,
    ROOMS,
    UNSEEN_TEMPLATES,
    WAYS,
    commands,
    house,
    split_of,
)
from whet.errors import DataError

SPLITS = ("train", "valid", "test")
MANY = 2_000


def sentences(records):
    return [record["messages"][0]["content"] for record in records]


def answers(records):
    return [json.loads(record["messages"][1]["content"]) for record in records]


def digest(records):
    return hashlib.sha256(json.dumps(records).encode()).hexdigest()


def test_records_do_not_depend_on_the_process():
    program = (
        "import hashlib, json, sys; from whet.data.synthetic.house import house;"
        "records = [house(split, 50) for split in ('train', 'valid', 'test')];"
        "print(hashlib.sha256(json.dumps(records).encode()).hexdigest(), 'torch' in sys.modules)"
    )
    source = str(Path(whet.__file__).parents[1])
    printed = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert printed == [digest([house(split, 50) for split in SPLITS]), "False"]


@pytest.mark.parametrize("split", SPLITS)
def test_fewer_records_are_a_prefix_of_more(split):
    many = house(split, 250)
    for n in (1, 4, 5, 200):
        assert house(split, n) == many[:n]


def test_no_sentence_occurs_twice_or_in_two_splits():
    all_sentences = [sentence for split in SPLITS for sentence in sentences(house(split, MANY))]
    assert len(all_sentences) == len(set(all_sentences)) == 3 * MANY


def test_split_of_a_sentence_ignores_case_and_punctuation():
    for sentence in sentences(house("test", 100)):
        assert split_of(sentence.upper().replace(",", "") + " !") == split_of(sentence) == "test"


def test_sentence_has_one_meaning_and_one_template():
    meanings = {}
    for command in commands(KNOWN_TEMPLATES + UNSEEN_TEMPLATES):
        if command.room == "office":  # one room with its two names represents all rooms
            meanings.setdefault(command.sentence(), set()).add((command.template, command.answer()))
    assert {len(meaning) for meaning in meanings.values()} == {1}


def test_a_fifth_of_the_templates_is_not_in_training():
    assert len(UNSEEN_TEMPLATES) * 5 == len(KNOWN_TEMPLATES) + len(UNSEEN_TEMPLATES) == 40
    assert not set(UNSEEN_TEMPLATES) & set(KNOWN_TEMPLATES)
    for split in ("train", "valid"):
        assert {record["group"] for record in house(split, 400)} == {"known"}


def test_one_test_command_in_five_has_an_unseen_template():
    test = house("test", 200)
    assert Counter(record["group"] for record in test) == {"known": 160, "unseen": 40}
    assert [i for i, record in enumerate(test) if record["group"] == "unseen"] == list(range(4, 200, 5))


@pytest.mark.parametrize("split", SPLITS)
def test_every_answer_is_a_compact_valid_action(split):
    for record in house(split, 1000):
        user, assistant = record["messages"]
        answer = json.loads(assistant["content"])
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        assert list(answer) == ["room", "device", "action", "delay"]
        assert assistant["content"] == json.dumps(answer, separators=(",", ":"))
        assert answer["room"] in ROOMS
        assert answer["action"] in DEVICES[answer["device"]].actions
        assert answer["delay"] in {0, *DELAYS}


def named(words, sentence):
    """Return the values of a table {value: words} that a sentence mentions."""
    padded = f" {sentence.lower().replace(',', '').replace('?', '')} "
    return {value for value, names in words.items() if any(f" {word.lower()} " in padded for word in names)}


@pytest.mark.parametrize("split", SPLITS)
def test_sentence_matches_the_answer(split):
    device_names = {device: names for device, (names, _) in DEVICES.items()}
    verbs = {
        action: {form.replace("{}", "").split()[0] for way in ways for form in way}
        for action, ways in WAYS.items()
    }
    records = house(split, 1000)
    for sentence, answer in zip(sentences(records), answers(records), strict=True):
        assert named(ROOMS, sentence) == {answer["room"]}
        assert named(device_names, sentence) == {answer["device"]}
        assert (named(DELAYS, sentence) or {0}) == {answer["delay"]}
        assert answer["action"] in named(verbs, sentence)
        if answer["action"] in ("on", "off", "up", "down"):
            particles = {word: (word,) for word in ("on", "off", "up", "down")}
            assert named(particles, sentence) <= {answer["action"]}


def test_words_are_unambiguous():
    for table in (ROOMS, DELAYS, {device: names for device, (names, _) in DEVICES.items()}):
        words = [word for names in table.values() for word in names]
        assert len(words) == len(set(words))


def test_training_covers_every_template_value_and_word():
    records = house("train", 300)
    train_sentences = sentences(records)
    known = {command.sentence(): command for command in commands(KNOWN_TEMPLATES)}
    train = [known[sentence] for sentence in train_sentences]
    expected = {
        "template": (KNOWN_TEMPLATES, 9),
        "room": (ROOMS, 25),
        "room_name": ([name for names in ROOMS.values() for name in names], 10),
        "device": (DEVICES, 25),
        "device_name": ([name for device in DEVICES.values() for name in device.names], 10),
        "action": (WAYS, 10),
        "when": (["", *(when for whens in DELAYS.values() for when in whens)], 8),
        "delay": ([0, *DELAYS], 15),
        "way": ([way for ways in WAYS.values() for way in ways], 3),
    }
    for field, (values, at_least) in expected.items():
        counts = Counter(getattr(command, field) for command in train)
        assert set(counts) == set(values), field
        assert min(counts.values()) >= at_least, (field, counts.most_common()[-3:])
    orders = Counter((command.device, command.action) for command in train)
    assert set(orders) == {(device, action) for device, (_, actions) in DEVICES.items() for action in actions}
    assert min(orders.values()) >= 10


def test_specs_of_the_demo():
    assert generate("synth:house:400") == generate("synth:house") == house("train", 400)
    assert generate("synth:house-valid") == house("valid", 40)
    assert generate("synth:house-test") == house("test", 200)


def test_unknown_name_lists_known_names():
    with pytest.raises(DataError, match=r"synth:hose:3.*'hose'") as caught:
        generate("synth:hose:3")
    assert "did you mean 'house'?" in caught.value.hint
    assert all(name in caught.value.hint for name in GENERATORS)
    with pytest.raises(DataError) as caught:
        generate("synth:quux")
    assert "did you mean" not in caught.value.hint


@pytest.mark.parametrize("count", ["", "0", "-3", "2.5", "many", "٣", " 7", "9" * 5000])
def test_count_must_be_a_positive_integer(count):
    with pytest.raises(DataError, match=r"synth:house.*positive integer of at most 12 digits"):
        generate(f"synth:house:{count}")


def test_seed_is_rejected_for_unseeded_source():
    with pytest.raises(DataError, match="house does not accept a seed"):
        generate("synth:house:1:2")


def test_error_for_too_many_records_names_spec_and_available_count(monkeypatch):
    monkeypatch.setattr("whet.data.synthetic.house.KNOWN_TEMPLATES", KNOWN_TEMPLATES[12:15])
    with pytest.raises(DataError, match=r"synth:house-valid:999999.*only \d+") as caught:
        generate("synth:house-valid:999999")
    available = int(caught.value.hint.split()[-1])
    everything = {command.sentence() for command in commands(KNOWN_TEMPLATES[12:15])}
    valid = {sentence for sentence in everything if split_of(sentence) == "valid"}
    assert set(sentences(generate(f"synth:house-valid:{available}"))) == valid
    assert len(valid) == available


def test_spec_with_another_scheme_is_rejected():
    with pytest.raises(DataError, match="not a synthetic source"):
        generate("house:40")
