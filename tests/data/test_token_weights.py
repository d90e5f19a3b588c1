"""Loss weights of records, turns and parts: each token has that of its turn or part, from file to batch."""

import copy
import json

import numpy as np
import pytest
from chat_templates import TEMPLATES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiny import TEMPLATE, weighted_examples, weights_of
from whet.data.batches import make_batch
from whet.data.sources.source import Record, open_source
from whet.data.tokens.chat_template import Renderer
from whet.data.tokens.examples import Example, build_examples
from whet.data.tokens.loss_mask import overlay, selected_turns
from whet.data.tokens.prepare_dataset import Preparation, encode_records
from whet.data.tokens.token_store import open_store, write_store
from whet.data.tokens.tokenize import Encoder
from whet.errors import DataError

WEIGHTS = st.sampled_from([0, 0.25, 0.5, 1, 1, 2, 3.5])


def record(**fields):
    return Record(fields, "here.jsonl:7")


def weights_by_text(tokenizer, one, **options):
    """Return the supervised text in runs of equal weight, as (text, weight)."""
    example = Encoder(tokenizer).encode_one(Renderer(tokenizer, **options).render(one))
    weights = example.supervised if example.weights is None else example.weights
    assert [weight > 0 for weight in weights] == list(example.supervised)
    runs = []
    for token, weight in zip(example.tokens, weights, strict=True):
        if runs and runs[-1][1] == weight:
            runs[-1][0].append(token)
        else:
            runs.append(([token], weight))
    return [(tokenizer.decode(tokens), float(weight)) for tokens, weight in runs if weight]


@st.composite
def conversations(draw):
    """Draw messages in which every part has a text of its own, so that it can be searched for."""
    messages = []
    roles = ["user", "assistant"] * draw(st.integers(1, 4))
    for index, role in enumerate(roles):
        parts = [
            {"type": "text", "text": f"x{index}{'abcdef'[number]}{draw(st.sampled_from(['y', 'y z', 'é']))}"}
            for number in range(draw(st.integers(1, 4)))
        ]
        for part in parts if draw(st.booleans()) else ():
            part.update({"weight": draw(WEIGHTS)} if draw(st.booleans()) else {})
        message = {"role": role, "content": parts}
        marks = draw(st.sampled_from(["none", "weight", "train"]))
        if marks != "none":
            message |= {"weight": draw(WEIGHTS)} if marks == "weight" else {"train": draw(st.booleans())}
        messages.append(message)
    return messages


def character_weights(messages, text, render, turns, everything):
    """The reference: turns by rendering prefixes with transformers, parts by searching for their text."""
    weights = [1.0 if everything else 0.0] * len(text)
    for index in turns:
        before = render(messages[:index], messages[index]["role"] == "assistant") if index else ""
        after = render(messages[: index + 1], False)
        assert text.startswith(before)
        assert text.startswith(after)
        own = messages[index].get("weight", 1.0) * messages[index].get("train", True)
        weights[len(before) : len(after)] = [own] * (len(after) - len(before))
        for part in messages[index]["content"]:
            if "weight" in part:
                at = text.index(part["text"])
                weights[at : at + len(part["text"])] = [part["weight"]] * len(part["text"])
    return weights


@pytest.mark.parametrize(
    "supervise", ["assistant", "last", "completion", "all", ["user"], ["user", "assistant"]]
)
@pytest.mark.parametrize("name", ["tiny", "chatml", "trims", "alternates", "thinks", "in loop", "marks"])
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(messages=conversations(), record_weight=st.sampled_from([None, 1, 0.5, 3]))
def test_each_token_has_the_weight_of_its_turn_or_part(tiny, name, supervise, messages, record_weight):
    tokenizer = copy.copy(tiny[1])
    tokenizer.chat_template = {**TEMPLATES, "tiny": TEMPLATE}[name]

    def render(part, prompt):
        plain = [{"role": m["role"], "content": "".join(p["text"] for p in m["content"])} for m in part]
        return tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=prompt)

    turns = range(len(messages)) if supervise == "all" else selected_turns(messages, supervise)
    text = render(messages, False)
    expected = character_weights(messages, text, render, turns, supervise == "all")
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    scale = record_weight or 1
    token_weights = [
        np.float32(scale * max(expected[low:high], default=0.0)) for low, high in encoding["offset_mapping"]
    ]
    one = record(messages=copy.deepcopy(messages), weight=record_weight)
    try:
        example = Encoder(tokenizer).encode_one(Renderer(tokenizer, supervise=supervise).render(one))
    except DataError:
        assert not any(token_weights[1:])
        return
    assert example.tokens.tolist() == encoding["input_ids"]
    actual = example.supervised if example.weights is None else example.weights
    assert [float(weight) for weight in actual] == token_weights
    assert example.supervised_count == sum(weight > 0 for weight in token_weights[1:])


def test_weights_that_are_all_one_need_no_array(tiny):
    parts = [{"type": "text", "text": "a", "weight": 1}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": "q", "weight": 0},
        {"role": "assistant", "content": parts, "weight": 1.0},
    ]
    [example] = encode_records([record(messages=messages, weight=1)], tiny[1])
    assert example.weights is None


@pytest.mark.parametrize(
    ("supervise", "expected"),
    [
        (
            "assistant",
            [("call<|end|>", 1.0), ("done<|end|>", 1.0), ("more<|end|>", 1.0), ("end<|end|>", 1.0)],
        ),
        ("last", [("end<|end|>", 1.0)]),
        ("completion", [("more<|end|>", 1.0), ("end<|end|>", 1.0)]),
        (["tool"], [("<|tool|>42<|end|>", 1.0), ("<|tool|>43<|end|>", 1.0)]),
        (["system"], [("|system|>Be kind.<|end|>", 1.0)]),
    ],
)
def test_rule_selects_turns(tiny, supervise, expected):
    roles = ["system", "user", "assistant", "tool", "assistant", "user", "assistant", "tool", "assistant"]
    texts = ["Be kind.", "a?", "call", "42", "done", "b?", "more", "43", "end"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    tiny[1].chat_template = TEMPLATE
    runs = weights_by_text(tiny[1], record(messages=messages), supervise=supervise)
    assert [(text.removeprefix("<") if supervise == ["system"] else text, w) for text, w in runs] == expected


def test_completion_is_that_of_a_record_and_text_has_none(tiny):
    assert weights_by_text(tiny[1], record(prompt="q", completion="a"), supervise="completion") == [
        ("a<|end|>", 1.0)
    ]
    tiny[1].chat_template = None
    assert weights_by_text(tiny[1], record(prompt="q", completion="a"), supervise="completion") == [
        ("a<|end|>", 1.0)
    ]
    with pytest.raises(DataError, match="a text record has no completion, and data.supervise is completion"):
        weights_by_text(tiny[1], record(text="a"), supervise="completion")


@pytest.mark.parametrize("supervise", ["none", [], [""], [3]])
def test_invalid_rule_is_rejected(tiny, supervise):
    with pytest.raises(DataError, match="supervise"):
        Renderer(tiny[1], supervise=supervise)


@pytest.mark.parametrize("weight", [2, 0.5, "2.5"])
@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_record_weight_applies_to_text_and_eos(tiny, weight, template):
    tiny[1].chat_template = template
    for fields, text in (({"prompt": "q", "completion": "a"}, "a"), ({"text": "story"}, "story")):
        assert weights_by_text(tiny[1], record(**fields, weight=weight)) == [
            (f"{text}<|end|>", float(weight))
        ]


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (0, "the weight of the record is 0"),
        (-1, "must be a number from 0"),
        ("much", "must be a number from 0"),
    ],
)
def test_invalid_record_weight_is_rejected(tiny, weight, message):
    with pytest.raises(DataError, match=f"here.jsonl:7: .*{message}"):
        weights_by_text(tiny[1], record(text="a", weight=weight))
    assert weights_by_text(tiny[1], record(text="a", weight="")) == [("a<|end|>", 1.0)]  # an empty CSV cell


def parts(*pairs):
    return [{"type": "text", "text": text} | ({} if w is None else {"weight": w}) for text, w in pairs]


def test_part_replaces_the_weight_of_its_message_only_for_its_text(tiny):
    content = parts(("bad", 0), (" good", 2), (" plain", None))
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content, "weight": 0.5}]
    assert weights_by_text(tiny[1], record(messages=messages)) == [(" good", 2.0), (" plain<|end|>", 0.5)]
    masked = [messages[0], {**messages[1], "weight": 0}]
    assert weights_by_text(tiny[1], record(messages=masked)) == [(" good", 2.0)]


def test_parts_are_found_where_the_template_trims_or_moves_them(tiny):
    tokenizer = tiny[1]
    tokenizer.chat_template = TEMPLATES["trims"]
    content = parts(("  a", 2), ("user", None), (" b \n", 0.5))
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    assert weights_by_text(tokenizer, record(messages=messages)) == [
        ("a", 2.0),
        ("user", 1.0),
        (" b", 0.5),
        ("<|eot|>", 1.0),
    ]
    tokenizer.chat_template = TEMPLATES["thinks"]
    content = parts(("<think>\nhm", 0), ("\n</think>", 0.5), ("\n\nyes", 3))
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    assert weights_by_text(tokenizer, record(messages=messages)) == [
        ("\n</think>\n\n", 0.5),
        ("yes", 3.0),
        ("<|im_end|>\n", 1.0),
    ]


def test_parts_that_the_template_rewrites_are_rejected(tiny):
    tiny[1].chat_template = TEMPLATE.replace("m['content']", "m['content'] | upper")
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": parts(("straße ", 2), ("x", 1))},
    ]
    assert weights_by_text(tiny[1], record(messages=messages)) == [("STRASSE ", 2.0), ("X<|end|>", 1.0)]
    tiny[1].chat_template = TEMPLATE.replace("m['content']", "m['content'].split() | sort | join")
    messages[1]["content"] = parts(("x ", 2), ("a", 1))
    with pytest.raises(DataError, match="changes the content of message 2, so its weighted parts"):
        weights_by_text(tiny[1], record(messages=messages))


@settings(max_examples=100)
@given(
    base=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 8), st.floats(0, 3)), max_size=3),
    top=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 8), st.floats(0, 3)), max_size=3),
)
def test_overlay_paints_the_top_over_the_base(base, top):
    def disjoint(items):
        spans, end = [], 0
        for gap, size, weight in items:
            spans.append((end + gap, end + gap + size, weight))
            end += gap + size
        return spans

    base, top = disjoint(base), disjoint(top)
    expected = dict.fromkeys(range(100))
    for low, high, weight in (*base, *top):
        expected |= dict.fromkeys(range(low, high), weight)
    painted = dict.fromkeys(range(100))
    for low, high, weight in overlay(base, top):
        assert all(painted[at] is None for at in range(low, high))
        painted |= dict.fromkeys(range(low, high), weight)
    assert painted == expected


def test_store_keeps_weights_and_does_not_grow_without_them(tmp_path):
    examples = weighted_examples(20)
    assert sum(example.weights is not None for example in examples) > 5
    write_store(tmp_path / "weighted", examples)
    stored = build_examples(open_store(tmp_path / "weighted"), max_length=100, too_long="error")
    for expected, one in zip(examples, stored, strict=True):
        mask = np.asarray(expected.supervised)
        assert weights_of(one)[mask].tolist() == weights_of(expected)[mask].tolist()
    plain = [Example(one.tokens, one.supervised, one.origin) for one in examples]
    store = write_store(tmp_path / "plain", plain)
    assert not store.has_weights
    assert {path.name for path in (tmp_path / "plain").iterdir()} == {
        *(
            "meta.json",
            "tokens.bin",
            "bounds.bin",
            "learned.bin",
            "values.bin",
            "origins.bin",
            "origin_bounds.bin",
        )
    }
    assert store.digest != open_store(tmp_path / "weighted").digest
    heavier = [
        *examples[:-1],
        Example(examples[-1].tokens, examples[-1].supervised, "x", weights=[9.0] * len(examples[-1].tokens)),
    ]
    assert write_store(tmp_path / "heavier", heavier).digest != open_store(tmp_path / "weighted").digest


@pytest.mark.parametrize("too_long", ["truncate", "split"])
def test_windows_keep_the_weights_of_their_tokens(tmp_path, too_long):
    examples = weighted_examples(20, share=1)
    stored = build_examples(write_store(tmp_path / "s", examples), max_length=9, too_long=too_long)
    by_origin = {one.origin: one for one in examples}
    seen = {}
    for window in stored:
        whole = by_origin[window.origin]
        start = seen.get(window.origin, 0)
        while list(whole.tokens[start : start + len(window.tokens)]) != list(window.tokens):
            start += 1
        targets = slice(start + 1, start + len(window.tokens))
        mask = np.asarray(whole.supervised[targets])
        assert weights_of(window)[1:][mask].tolist() == weights_of(whole)[targets][mask].tolist()
        seen[window.origin] = start + 1


def test_packed_and_padded_batches_have_the_weights_of_their_targets():
    examples = weighted_examples(12)
    for rows in ([examples[:6], examples[6:]], [[one] for one in examples]):
        batch = make_batch(rows)
        expected = [weight for one in examples for weight in weights_of(one)[1:] if weight]
        assert batch.supervised_weights.tolist() == expected
        assert batch.supervised == len(expected)
        assert float(batch.weights.sum()) == pytest.approx(sum(expected))  # padding has none
    assert make_batch([examples[:1]]).weights is None


def test_cached_store_is_reused_with_its_weights(tiny, tmp_path):
    rows = [{"prompt": "q", "completion": f"{n}", "weight": n} for n in range(1, 4)]
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    for _ in range(2):
        store = Preparation(tiny[1], cache=tmp_path / "cache").store(open_source(str(path)))
        stored = build_examples(store, max_length=100, too_long="error")
        assert [float(one.weights[-1]) for one in stored] == [1, 2, 3]
        with pytest.raises(
            DataError, match="train.jsonl:2: .* has a weight, which this objective cannot use"
        ):
            Preparation(tiny[1], cache=tmp_path / "cache", weights=False, skip_bad=True).store(
                open_source(str(path))
            )
