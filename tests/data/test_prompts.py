"""Prompts: the text before the completion, for records of every format."""

import json

import pytest

from whet.data.sources.source import open_source
from whet.data.synthetic.generators import generate
from whet.data.tokens.prompts import read_prompts
from whet.errors import DataError


def prompts(tmp_path, tokenizer, *records, form="auto", **settings):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_prompts(open_source(str(path), form=form), tokenizer, **settings)


def test_every_format_gives_the_text_before_its_completion(tmp_path, tiny):
    _, tokenizer = tiny
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
    records = [
        {"messages": [user, answer], "group": "known", "extra": [1]},
        {"messages": [user]},
        {"prompt": "hi", "completion": "yes"},
        {"prompt": "hi"},
        {"prompt": [user]},
        {"prompt": "hi", "chosen": "yes", "rejected": "no"},
    ]
    parsed = prompts(tmp_path, tokenizer, *records)
    assert {tokenizer.decode(prompt.tokens) for prompt in parsed} == {"<|user|>hi<|end|><|assistant|>"}
    assert [prompt.question.answer for prompt in parsed] == ["yes", "", "yes", "", "", "yes"]
    assert {prompt.question.text for prompt in parsed} == {"hi"}
    assert parsed[0].question.group == "known"
    assert parsed[0].fields["extra"] == [1]
    tokenizer.chat_template = None
    parsed = prompts(tmp_path, tokenizer, *records[2:4])
    assert [tokenizer.decode(prompt.tokens) for prompt in parsed] == ["hi", "hi"]


def test_question_is_a_prompt_with_prompt_format(tmp_path, tiny):
    [prompt] = prompts(tmp_path, tiny[1], {"question": "1+1?", "answer": "#### 2"}, form="prompt")
    assert prompt.question.text == "1+1?"
    assert prompt.fields["answer"] == prompt.question.answer == "#### 2"


def test_prompt_keeps_its_answer_and_group(tmp_path, tiny):
    _, tokenizer = tiny
    records = [
        {"question": "1+1?", "answer": "2", "group": "sums"},
        {"prompt": "1+1?", "answer": 2, "group": "sums"},
        {"prompt": [{"role": "user", "content": "1+1?"}], "answer": "2", "group": "sums"},
        {"prompt": "1+1?", "completion": "2", "answer": "two", "group": "sums"},
    ]
    for template in (tokenizer.chat_template, None):
        tokenizer.chat_template = template
        for record in records if template else records[:2]:
            [prompt] = prompts(tmp_path, tokenizer, record, form="prompt")
            assert (prompt.question.answer, prompt.question.group) == ("2", "sums")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    [prompt] = prompts(tmp_path, tokenizer, {"messages": records[2]["prompt"], "answer": "2"})
    assert prompt.question.answer == "2"


def test_records_without_a_prompt_are_rejected_or_counted(tmp_path, tiny):
    bad, good = {"text": "only a text"}, {"prompt": "hi"}
    with pytest.raises(DataError, match=":2: a text record has no prompt to complete"):
        prompts(tmp_path, tiny[1], good, bad)
    parsed = prompts(tmp_path, tiny[1], good, bad, skip_bad=True)
    assert (len(parsed), parsed.skipped.count) == (1, 1)
    with pytest.raises(DataError, match="prompts.jsonl:1: a text record has no prompt to complete"):
        prompts(tmp_path, tiny[1], bad, skip_bad=True)
    with pytest.raises(DataError, match="contains no records"):
        prompts(tmp_path, tiny[1])


def test_sums_are_correct_and_splits_are_disjoint():
    train, valid = generate("synth:sums"), generate("synth:sums-valid")
    assert len({record["prompt"] for record in [*train, *valid]}) == 4550 + 500 == 100 * 101 // 2
    for record in [*train, *valid]:
        a, b = map(int, record["prompt"].removesuffix("=").split("+"))
        assert int(record["completion"]) == a + b <= 99
    assert generate("synth:sums:3") == train[:3]
    careless = generate("synth:sums-careless")
    assert [record["prompt"] for record in careless] == [record["prompt"] for record in train]
    off = [int(a["completion"]) - int(b["completion"]) for a, b in zip(train, careless, strict=True)]
    carried = [sum(int(n) % 10 for n in record["prompt"].rstrip("=").split("+")) >= 10 for record in train]
    assert set(off) == {0, 10}
    assert all(carry or right == 0 for carry, right in zip(carried, off, strict=True))
    assert 0.57 < off.count(10) / carried.count(True) < 0.63
    with pytest.raises(DataError, match="only 500"):
        generate("synth:sums-valid:501")
