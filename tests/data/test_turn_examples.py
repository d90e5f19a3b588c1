"""Conversations whose earlier turns the template rewrites: every turn is trained after its served prompt."""

import copy
import json

import pytest
import torch
from chat_templates import TEMPLATES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from template_shapes import SHAPES
from transformers import AutoModelForCausalLM

import whet
from data.test_template_probe import THINK, conversations, record, tokenizer_with
from tiny import run_config, weights_of
from whet.config.load_config import validate_config
from whet.data.sources.source import validate_record
from whet.data.tokens.chat_template import Renderer
from whet.data.tokens.field_audit import FieldAudit
from whet.data.tokens.prepare_dataset import encode_records
from whet.data.tokens.tokenize import Encoder
from whet.errors import DataError
from whet.reporting.data.data_wording import split_rows
from whet.runs.assemble import open_assembly
from whet.runs.inspect_data import view_data

SHAPE = {shape.family: shape.template for shape in SHAPES}
ALL = {**SHAPE, **{f"odd {name}": template for name, template in TEMPLATES.items()}}
CHAT = [
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": f"{THINK}a"},
    {"role": "user", "content": "2"},
    {"role": "assistant", "content": f"{THINK}b"},
    {"role": "user", "content": "3"},
    {"role": "assistant", "content": f"{THINK}c"},
]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOLS = [
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": f"{THINK}", "tool_calls": [CALL]},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": f"{THINK}a"},
]


def prompts_of(tokenizer, messages, **arguments):
    """Return the prompt that is served before each assistant turn, rendered by transformers."""
    return {
        index: tokenizer.apply_chat_template(
            messages[:index], tokenize=False, add_generation_prompt=True, **arguments
        )
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
    }


@pytest.mark.parametrize("turns", ["auto", "each"])
@pytest.mark.parametrize("family", ALL)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(messages=conversations(), enable=st.sampled_from([None, True, False]), trailing=st.booleans())
def test_every_turn_follows_the_prompt_that_is_served(tiny, family, turns, messages, enable, trailing):
    tokenizer = tokenizer_with(tiny, ALL[family])
    arguments = {} if enable is None or "enable_thinking" not in ALL[family] else {"enable_thinking": enable}
    if trailing:
        messages = [*messages, {"role": "user", "content": "bye"}]
    renderer, encoder = Renderer(tokenizer, turns=turns, template_args=arguments), Encoder(tokenizer)
    try:
        examples = renderer.render_turns(record(messages=copy.deepcopy(messages)))
    except DataError:  # the prompt closes the thinking that the answer has
        assert enable is False
        return
    prompts = prompts_of(tokenizer, messages, **arguments)
    supervised = []
    for rendering in examples:
        example = encoder.encode_one(rendering)
        for low, high in rendering.spans:
            [turn] = [index for index, prompt in prompts.items() if rendering.text[:low] == prompt]
            ids = tokenizer.apply_chat_template(
                messages[:turn], add_generation_prompt=True, return_dict=False, **arguments
            )
            assert example.tokens[: len(ids)].tolist() == ids
            assert example.supervised[len(ids)]
            assert messages[turn]["content"].removeprefix(THINK) in rendering.text[low:high]
            supervised.append(turn)
    lost = sum(rendering.lost_turns for rendering in examples)
    assert supervised == sorted(set(supervised)), "every turn once, in order"
    assert len(supervised) == len(prompts) - lost
    assert not lost or enable is False
    if turns == "each":
        assert all(len(rendering.spans) == 1 for rendering in examples)
    else:
        last = Renderer(tokenizer, turns="last", template_args=arguments)
        try:
            assert last.render(record(messages=messages)).only_last == (len(examples) + lost > 1)
        except DataError:  # a turn before the last message, which the template rewrites
            assert trailing


@pytest.mark.parametrize(("turns", "sizes"), [("auto", [2, 2]), ("each", [1, 1, 1, 1]), ("last", [1])])
def test_turns_that_one_text_can_have_share_an_example(tiny, turns, sizes):
    """Qwen3 keeps the thinking after the last question, so the calls that answer it fit one example."""
    renderer = Renderer(tokenizer_with(tiny, SHAPE["Qwen3"]), turns=turns)
    examples = renderer.render_turns(record(messages=[*TOOLS, *TOOLS]))
    assert [len(example.spans) for example in examples] == sizes
    if len(sizes) > 1:
        assert examples[0].origin == f"here.jsonl:7 (1 of {len(sizes)})"


def test_conversation_that_is_not_rewritten_stays_one_example(tiny):
    tokenizer = tokenizer_with(tiny, SHAPE["SmolLM2"])
    [example] = Renderer(tokenizer).render_turns(record(messages=CHAT))
    assert example == Renderer(tokenizer).render(record(messages=CHAT))
    assert len(Renderer(tokenizer, turns="each").render_turns(record(messages=CHAT))) == 3
    for rule in ("last", "all", "completion"):
        assert len(Renderer(tokenizer, supervise=rule).render_turns(record(messages=CHAT))) == 1


def test_weights_of_messages_and_records_apply_to_every_example(tiny):
    tokenizer = tokenizer_with(tiny, SHAPE["Qwen3"])
    weights = [0.5, 0, 2]
    chat = copy.deepcopy(CHAT)
    for message, weight in zip(chat[1::2], weights, strict=True):
        message["weight"] = weight
    examples = encode_records([record(messages=chat, weight=3)], tokenizer)
    assert len(examples) == 2, "a turn of weight 0 is no example"
    plain = encode_records([record(messages=CHAT)], tokenizer)
    for example, weight, same in zip(examples, (0.5, 2), (plain[0], plain[2]), strict=True):
        assert example.tokens.tolist() == same.tokens.tolist()
        assert weights_of(example).tolist() == [3 * weight * mark for mark in same.supervised]


def test_earlier_turn_that_cannot_follow_its_prompt_is_left_out_and_counted(tiny):
    chat = [*CHAT[:2], *CHAT[2:3], {"role": "assistant", "content": "b"}]
    options = {"template_args": {"enable_thinking": False}}
    tokenizer = tokenizer_with(tiny, SHAPE["Qwen3"])
    [example] = Renderer(tokenizer, **options).render_turns(record(messages=chat))
    assert example.lost_turns == 1
    with pytest.raises(DataError, match="but does not write this before message 2"):
        Renderer(tokenizer, turns="each", **options).render_turns(record(messages=chat))


@pytest.fixture
def thinking_model(tiny_directory, tmp_path):
    """The tiny model with a template that strips earlier thinking, and a file of conversations."""
    for path in tiny_directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(SHAPE["Qwen3"])
    rows = [
        {"messages": [{**m, "content": f"{m['content']} {n}"} for m in CHAT[: 2 + 2 * (n % 3)]]}
        for n in range(9)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path, rows


def data_config(path, **data):
    values = {"train": str(path / "chats.jsonl"), "valid": None, "max_length": 512, **data}
    return run_config(path, path, data=values, run={"steps": 1})


def test_eval_loss_is_the_mean_over_the_tokens_of_all_turns(thinking_model):
    """An independent mean: the answer tokens of every prefix, computed by transformers."""
    path, rows = thinking_model
    config = data_config(path, valid=str(path / "chats.jsonl"))
    result = whet.train(config)
    _, tokenizer = whet.load(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    total = count = 0
    for row in rows:
        messages = row["messages"]
        for turn in range(1, len(messages), 2):
            prompt = tokenizer.apply_chat_template(
                messages[:turn], add_generation_prompt=True, return_dict=False
            )
            ids = tokenizer.apply_chat_template(messages[: turn + 1], return_dict=False)
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            answer = logprobs.gather(1, torch.tensor(ids)[1:, None])[len(prompt) - 1 :]
            total, count = total - answer.sum().item(), count + len(answer)
    losses = [row["eval_loss"] for row in result.history if "eval_loss" in row]
    assert losses[0] == pytest.approx(total / count, rel=1e-5)
    log = (result.directory / "log.txt").read_text()
    assert "train: 6 conversations as 15 examples, because the chat template rewrites earlier turns" in log


def test_examples_are_counted_and_reported(thinking_model):
    path, _ = thinking_model
    config = validate_config(data_config(path))
    [split] = view_data(config, samples=1).splits
    assert (split.records, split.examples, split.only_last) == (9, 18, 0)
    rows = dict(split_rows(split, view_data(config, samples=1)))
    assert rows["turns"].startswith("6 conversations as 15 examples")
    [last] = view_data(validate_config(data_config(path, turns="last")), samples=1).splits
    assert (last.records, last.examples, last.only_last, last.split) == (9, 9, 6, None)


def test_examples_of_a_conversation_stay_on_one_side_and_stores_differ(thinking_model):
    path, _ = thinking_model
    with open_assembly(validate_config(data_config(path, valid=0.4))) as work:
        sides = {
            name: {example.origin.partition(" (")[0] for example in examples}
            for name, examples in work.data.examples.items()
        }
        stores = {work.data.examples["train"].store.directory}
    assert sides["train"]
    assert sides["valid"]
    assert not sides["train"] & sides["valid"]
    for turns in ("each", "last"):
        with open_assembly(validate_config(data_config(path, valid=0.4, turns=turns))) as work:
            stores.add(work.data.examples["train"].store.directory)
    assert len(stores) == 3


def test_each_example_is_limited_to_max_length(thinking_model):
    path, _ = thinking_model
    with open_assembly(validate_config(data_config(path))) as work:
        lengths = sorted(len(example.tokens) for example in work.data.examples["train"])
    limit = lengths[len(lengths) // 2]
    config = data_config(path, max_length=limit, too_long="drop")
    with open_assembly(validate_config(config)) as work:
        assert len(work.data.examples["train"]) == sum(length <= limit for length in lengths)


def test_thinking_of_earlier_turns_counts_as_tokenized(tiny):
    """It is in the example of its own turn, though not in the complete conversation."""
    chat = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "a", "reasoning_content": "so"},
        {"role": "user", "content": "2"},
        {"role": "assistant", "content": "b"},
    ]
    one = validate_record(record(messages=chat))
    for turns, unread in (("auto", {}), ("last", {"reasoning_content": 1})):
        audit = FieldAudit(Renderer(tokenizer_with(tiny, SHAPE["Qwen3"]), turns=turns))
        audit.add(one)
        assert audit.counts()["message"] == unread
