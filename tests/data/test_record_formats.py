"""Record formats are detected by their fields."""

import pytest

from whet.data.sources.record_formats import RECORD_FORMATS, normalize_record
from whet.data.sources.source import Record, validate_record
from whet.errors import DataError

USER, REPLY, OTHER = (
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
    {"role": "assistant", "content": "b"},
)
MORE = {"role": "user", "content": "more"}
SYSTEM = {"role": "system", "content": "s"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    ("fields", "shape", "expected"),
    [
        ({"messages": [USER, REPLY]}, "messages", {"messages": [USER, REPLY]}),
        ({"messages": [USER, CALL], "tools": [{}]}, "messages", {"messages": [USER, CALL], "tools": [{}]}),
        ({"messages": [USER], "tools": '[{"name": "f"}]'}, "messages", {"messages": [USER], "tools": [{"name": "f"}]}),
        ({"messages": [USER], "tools": None, "text": None}, "messages", {"messages": [USER]}),
        ({"messages": [USER], "tools": ""}, "messages", {"messages": [USER], "tools": []}),
        ({"prompt": "q", "completion": "a", "tools": "null"}, "completion",
         {"prompt": "q", "completion": "a", "tools": []}),
        ({"prompt": "q", "tools": '[{"name": "f"}]'}, "prompt", {"prompt": "q", "tools": [{"name": "f"}]}),
        ({"messages": [{**USER, "tool_calls": None}]}, "messages", {"messages": [USER]}),
        ({"messages": [{"role": "user", "content": parts("a", "b")}]}, "messages",
         {"messages": [{"role": "user", "content": "ab"}]}),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "messages",
         {"messages": [USER, REPLY]}),
        ({"conversations": [{"from": "human", "value": "q"}], "system": "s"}, "messages", {"messages": [SYSTEM, USER]}),
        ({"conversations": [USER, REPLY]}, "messages", {"messages": [USER, REPLY]}),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "preference", {"prompt": "q", "chosen": "a", "rejected": "b"}),
        ({"prompt": [SYSTEM, USER], "chosen": [REPLY], "rejected": [OTHER]}, "preference",
         {"prompt": [SYSTEM, USER], "chosen": [REPLY], "rejected": [OTHER]}),
        ({"prompt": [USER], "chosen": "a", "rejected": "b"}, "preference",
         {"prompt": [USER], "chosen": [REPLY], "rejected": [OTHER]}),
        ({"prompt": "q", "chosen": [USER, REPLY], "rejected": [USER, OTHER]}, "preference",
         {"prompt": [USER], "chosen": [REPLY], "rejected": [OTHER]}),
        ({"prompt": "q", "chosen": [USER, OTHER, MORE, REPLY], "rejected": [USER, OTHER, MORE, OTHER]}, "preference",
         {"prompt": [USER, OTHER, MORE], "chosen": [REPLY], "rejected": [OTHER]}),
        ({"prompt": "q", "chosen": [SYSTEM, USER, OTHER, MORE, REPLY], "rejected": [SYSTEM, USER, OTHER, MORE, OTHER]},
         "preference", {"prompt": [SYSTEM, USER, OTHER, MORE], "chosen": [REPLY], "rejected": [OTHER]}),
        ({"prompt": "q", "chosen": [USER, REPLY], "rejected": [OTHER]}, "preference",
         {"prompt": [USER], "chosen": [REPLY], "rejected": [OTHER]}),
        ({"prompt": "q", "chosen": "a", "rejected": [USER, OTHER]}, "preference",
         {"prompt": [USER], "chosen": [REPLY], "rejected": [OTHER]}),
        ({"chosen": [SYSTEM, USER, REPLY], "rejected": [SYSTEM, USER, OTHER]}, "preference",
         {"prompt": [SYSTEM, USER], "chosen": [REPLY], "rejected": [OTHER]}),
        ({"chosen": [USER, REPLY], "rejected": [USER, REPLY]}, "preference",
         {"prompt": [USER], "chosen": [REPLY], "rejected": [REPLY]}),
        ({"prompt": "q", "completion": "a"}, "completion", {"prompt": "q", "completion": "a"}),
        ({"instruction": "q", "input": "", "output": "a"}, "completion", {"prompt": "q", "completion": "a"}),
        ({"instruction": "q", "input": "x", "output": "a"}, "completion", {"prompt": "q\n\nx", "completion": "a"}),
        ({"instruction": "q", "output": "a"}, "completion", {"prompt": "q", "completion": "a"}),
        ({"instruction": "q", "output": "a", "system": "s"}, "messages", {"messages": [SYSTEM, USER, REPLY]}),
        ({"instruction": "more", "input": "", "output": "b", "history": [["q", "a"]]}, "messages",
         {"messages": [USER, REPLY, MORE, OTHER]}),
        ({"instruction": "q", "chosen": "a", "rejected": "b"}, "preference",
         {"prompt": "q", "chosen": "a", "rejected": "b"}),
        ({"instruction": "q", "system": "s", "chosen": "a", "rejected": "b"}, "preference",
         {"prompt": [SYSTEM, USER], "chosen": [REPLY], "rejected": [OTHER]}),
        ({"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "a"},
          "rejected": {"from": "gpt", "value": "b"}}, "preference",
         {"prompt": [USER], "chosen": [REPLY], "rejected": [OTHER]}),
        ({"input": {"messages": [USER], "tools": [], "parallel_tool_calls": True}, "preferred_output": [REPLY],
          "non_preferred_output": [OTHER]}, "preference", {"prompt": [USER], "chosen": [REPLY], "rejected": [OTHER]}),
        ({"chosen": "The sky is blue.", "rejected": "The sky is green."}, "preference",
         {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}),
        ({"chosen": "q: gray", "rejected": "q: green"}, "preference", {"prompt": "q:", "chosen": " gray", "rejected": " green"}),
        ({"prompt": [USER, REPLY, MORE], "completion": [OTHER]}, "messages",
         {"messages": [USER, {**REPLY, "weight": 0.0}, MORE, OTHER], "prompt": [USER, REPLY, MORE], "completion": "b"}),
        ({"prompt": [USER], "completion": "a"}, "messages", {"messages": [USER, REPLY], "completion": "a"}),
        ({"prompt": "q", "completion": [REPLY]}, "messages", {"messages": [USER, REPLY], "prompt": [USER]}),
        ({"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "messages",
         {"messages": [USER, REPLY]}),
        ({"conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "r"},
            {"from": "gpt", "value": "a"}],
          "tools": '[{"name": "f", "parameters": {}}]'}, "messages",
         {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [
             {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]},
             {"role": "tool", "content": "r"}, REPLY],
          "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}),
        ({"conversations": [USER, REPLY], "kto_tag": False}, "messages", {"label": False}),
        ({"input_ids": [1, 2, 3]}, "tokens", {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}),
        ({"input_ids": [1, 2, 3, 0], "labels": [-100, 2, 3, -100], "attention_mask": [1, 1, 1, 0]}, "tokens",
         {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}),
        ({"input": "x", "label": "cat"}, "classification", {"input": "x", "label": "cat"}),
        ({"input": "x", "label": 0}, "classification", {"input": "x", "label": 0}),
        ({"input": "x", "labels": [0, 1, 1]}, "classification", {"input": "x", "labels": [0, 1, 1]}),
        ({"input": "x", "labels": ["a", "b"]}, "classification", {"input": "x", "labels": ["a", "b"]}),
        ({"input": "x", "labels": [2, 5]}, "classification", {"input": "x", "labels": [2, 5]}),
        ({"input": "x", "labels": [0.0, 1.0]}, "classification", {"input": "x", "labels": [0, 1]}),
        ({"input": "x", "labels": [0.3, 1]}, "classification", {"input": "x", "labels": [0.3, 1]}),
        ({"input": "x", "label": 2.0}, "classification", {"input": "x", "label": 2}),
        ({"features": [1, 2.5], "target": 3}, "tabular", {"features": [1.0, 2.5], "target": 3.0}),
        ({"text": "t", "auth_weight": 0.99, "prov_entropy": 0}, "distrust",
         {"text": "t", "auth_weight": 0.99, "prov_entropy": 0.0}),
        ({"text": "t", "label": 1}, "text", {"text": "t", "label": 1}),
        ({"prompt": "q", "answer": 42}, "prompt", {"prompt": "q", "answer": 42}),
        ({"prompt": [USER]}, "prompt", {"prompt": [USER]}),
        # the first of several matching formats
        ({"messages": [USER], "prompt": "q", "chosen": "a", "rejected": "b"}, "messages", {"messages": [USER]}),
        ({"prompt": "q", "completion": "a", "text": "t"}, "completion", {"prompt": "q", "completion": "a"}),
        ({"prompt": "q", "text": "t"}, "text", {"text": "t"}),
    ],
)  # fmt: skip
def test_format_is_detected_by_fields_and_normalized(fields, shape, expected):
    detected, read = normalize_record(fields)
    assert detected == shape
    assert {name: read[name] for name in expected} == expected
    assert normalize_record(read) == (shape, read)  # normalization is idempotent


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "a record with the fields none matches no known record format\n.*known formats: messages; "),
        ({"text": None}, r"fields 'text' \(null\) matches no known record format"),
        ({"question": "q", "answer": "a"}, r"; the nearest, completion \(prompt \+ completion\), lacks prompt and completion\n.*set data.columns: {prompt: question, completion: answer}"),
        ({"prompt": "q", "Response": "a"}, None),
        ({"input": "q", "output": "a"}, "set data.columns: {prompt: input, completion: output}"),
        ({"sentence": "q", "category": "a"}, "set data.columns: {input: sentence, label: category}"),
        ({str(n): n for n in range(99)}, r"'19', \.\.\. matches no known record format"),
        ({"messages": {}}, "messages must be a list with at least one message"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "message 1 has a content part of type image_url: that needs a multimodal model, and whet trains text models only"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "message 1 has a content part of type str"),
        ({"messages": [{"role": "user", "content": 3}]}, r"message 1 \(user\) has no text content"),
        ({"messages": [{"role": "user", "content": None}]},
         r"message 1 \(user\) has no text content: it is null"),
        ({"messages": [USER], "tools": {}}, "tools must be a list, not dict"),
        ({"messages": [USER], "tools": "nonsense"}, "tools: not valid JSON"),
        ({"conversations": []}, "conversations must be a list with at least one message"),
        ({"conversations": ["x"]}, "message 1 must be an object with a role"),
        ({"conversations": [{"from": "human", "value": "x"}, {"from": "gpt"}]}, "turn 2 must be an object with from and value"),
        ({"conversations": [{"from": "function_call", "value": "x"}]}, r"turn 1 \(function_call\): not valid JSON"),
        ({"conversations": [{"from": "function_call", "value": "{}"}]}, "a JSON object with name and arguments"),
        ({"messages": [USER, REPLY], "images": ["a.png"]}, "the field images belongs to a multimodal model"),
        ({"prompt": "q", "completions": ["a"], "labels": [True]}, "stepwise supervision for a process reward model"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels must have one value for each of the 2 input_ids"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "labels must repeat input_ids, with -100 .*\n.*not shifted"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "attention_mask must have one value"),
        ({"input_ids": []}, "input_ids must be a list of token ids"),
        ({"input_ids": [1, -1]}, "input_ids must be a list of token ids"),
        ({"input_ids": [1, True]}, "input_ids must be a list of token ids"),
        ({"input": "q", "preferred_output": [REPLY], "non_preferred_output": [OTHER]}, "input must be an object with messages"),
        ({"conversations": [{"from": "moon", "value": "x"}]}, "turn 1 has the unknown speaker 'moon'\n.*human"),
        ({"chosen": "a", "rejected": "b"}, "chosen and rejected are text without a common beginning"),
        ({"chosen": [REPLY], "rejected": [OTHER]}, "chosen and rejected share no message, and the record has no prompt"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "prompt must be a string or a list of messages"),
        ({"prompt": "q", "completion": ["a"]}, "message 1 must be an object with a role"),
        ({"prompt": 3, "completion": "a"}, "prompt must be a string or a list of messages, not int"),
        ({"instruction": "q", "output": "a", "history": [["x"]]}, r"history must be a list of \[question, answer\] pairs"),
        ({"instruction": "q", "output": "a", "system": 3}, "system must be a string"),
        ({"instruction": "q", "output": 1}, "output must be a string"),
        ({"input": "x", "label": 1.5}, "label must be a class name or an integer >= 0, not 1.5"),
        ({"input": "x", "label": -1}, "not -1"),
        ({"input": "x", "label": 10**30}, "label must be"),
        ({"input": "x", "labels": [0, "a"]}, "labels must be a list of class names, of integers >= 0, or of one"),
        ({"input": "x", "labels": [0, -2]}, "labels must be"),
        ({"input": "x", "labels": [0.5, 1.5]}, "labels must be"),
        ({"input": "x", "labels": [0.5, -0.1]}, "labels must be"),
        ({"input": "x", "labels": [0.5, float("nan")]}, "labels must be"),
        ({"input": "x", "labels": "a"}, "labels must be"),
        ({"input": 3, "label": "a"}, "input must be a string"),
        ({"features": [], "target": 1}, "features must be a list of numbers"),
        ({"features": [1, "x"], "target": 1}, "feature 2 must be a number, not 'x'"),
        ({"features": [True], "target": 1}, "feature 1 must be a number"),
        ({"features": [1], "target": float("nan")}, "target must be a number, not nan"),
        ({"features": [10**400], "target": 1}, "feature 1 must be a number"),
        ({"text": "t", "auth_weight": 1.0, "prov_entropy": 0}, "auth_weight must be from 0 to 0.99, not 1"),
        ({"text": "t", "auth_weight": -0.1, "prov_entropy": 0}, "auth_weight must be from 0"),
        ({"text": "t", "auth_weight": 0.1, "prov_entropy": -1}, "prov_entropy must not be negative"),
        ({"text": "t", "auth_weight": "0.1", "prov_entropy": 1}, "auth_weight must be a number, not '0.1'"),
        ({"text": "t", "auth_weight": 0.1}, "the record has auth_weight but not prov_entropy"),
        ({"text": "t", "prov_entropy": 0.1}, "the record has prov_entropy but not auth_weight"),
        ({"text": ["t"]}, "text must be a string, not list"),
        ({"prompt": 3}, "prompt must be a list"),
    ],
)  # fmt: skip
def test_invalid_record_error_explains_the_cause(fields, message):
    if message is None:
        assert normalize_record(fields)[0] == "prompt"
        return
    with pytest.raises(DataError, match=message) as caught:
        validate_record(Record(fields, "here.jsonl:7"))
    assert caught.value.message.startswith("here.jsonl:7: ")


def test_explicit_format_overrides_detection():
    fields = {"messages": [USER, REPLY], "text": "t", "prompt": "q", "completion": "a", "label": 1}
    assert normalize_record(fields, "text") == ("text", fields)
    assert normalize_record(fields, "prompt")[0] == "prompt"
    assert normalize_record(fields, "completion")[0] == "completion"
    assert normalize_record({"text": "t", "label": 1}, "classification") == (
        "classification",
        {"text": "t", "input": "t", "label": 1},
    )
    with pytest.raises(
        DataError, match=r"fields 'text' lacks the fields that data.format completion needs: prompt \+ comp"
    ):
        normalize_record({"text": "t"}, "completion")


def test_config_formats_equal_record_formats():
    from typing import get_args

    from whet.config.data import Data

    assert set(get_args(Data.model_fields["format"].annotation)) == {
        "auto",
        *(shape.name for shape in RECORD_FORMATS),
    }
