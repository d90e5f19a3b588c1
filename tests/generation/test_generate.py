"""Stop strings truncate a completion wherever tokens end, and streaming emits final text only."""

import copy

import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import whet
from whet.data.sources.source import Record
from whet.data.tokens.prepare_dataset import encode_records
from whet.errors import ConfigError, DataError
from whet.generation.best_of_n import best_of_n, majority_vote, sample_answers
from whet.generation.engine import complete
from whet.generation.generate import encode_prompt
from whet.generation.stop_strings import TextStream, stop_watcher, truncate_at_stop


def stream_text(tokenizer, text, stops):
    """Feed the bytes of a text to a stream, one by one; return the pieces, the text and the token count."""
    pieces, tokens = [], []
    stream = TextStream(tokenizer, stops, pieces.append)
    for token in tokenizer(text)["input_ids"]:
        tokens.append(token)
        if not stream.watch(0, tokens):
            break
    return pieces, stream.finish(tokens), len(tokens)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["four"], "one two three"),
        ("one two three", ["three", "o t"], "one tw"),  # the first to appear, not the first in the list
        ("aab aac", ["aac"], "aab "),  # a prefix of a stop string is emitted once it cannot be one
        ("ends with a star*", ["**"], "ends with a star*"),
        ("naïve 東京 stop", ["京"], "naïve 東"),
        ("x\n\nUser: hi", ["\nUser:", "\n\nUser"], "x"),
    ],
)
def test_stream_is_truncated_and_never_emits_partial_stop_string(tiny, text, stops, expected):
    pieces, answer, used = stream_text(tiny[1], text, stops)
    assert answer == expected == truncate_at_stop(text, stops)
    assert "".join(pieces) == expected
    if expected != text:
        assert used < len(text.encode()) or text.endswith(tuple(stops)), (
            "decoding stops when the stop string is complete"
        )


def test_byte_tokens_are_emitted_when_final():
    """With byte fallback, consecutive bytes decode together: an incomplete character makes all of them U+FFFD."""
    vocabulary = {"<unk>": 0, "hi": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    llamas = [2 + byte for byte in "\U0001f999\U0001f999".encode()]
    for tokens in (
        [1, *llamas],
        [1, *llamas, 1],
        [1, *llamas[:5]],
        [1, *llamas[:5], 1],
        [*llamas[:7], 1, *llamas[:4]],
    ):
        pieces = []
        stream = TextStream(tokenizer, (), pieces.append)
        for count in range(1, len(tokens) + 1):
            assert stream.watch(0, tokens[:count])
        assert stream.finish(tokens) == "".join(pieces) == tokenizer.decode(tokens)


def test_prompt_has_no_eos_from_the_tokenizer(tiny):
    tokenizer = copy.deepcopy(tiny[1])
    tokenizer.chat_template = None
    eos, bare = tokenizer.eos_token, tokenizer("lazy")["input_ids"]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{eos} $A {eos}", special_tokens=[(eos, tokenizer.eos_token_id)]
    )
    [example] = encode_records([Record({"prompt": "lazy", "completion": " dog"}, "here")], tokenizer)
    prompt = encode_prompt(tokenizer, "lazy")
    assert prompt == example.tokens.tolist()[:5] == [tokenizer.eos_token_id, *bare]
    assert encode_prompt(tokenizer, f"lazy{eos}") == [
        *prompt,
        tokenizer.eos_token_id,
    ]  # written by the user, so it stays


def test_text_is_emitted_as_soon_as_it_is_final(tiny):
    pieces, _, _ = stream_text(tiny[1], "é!<endless", ["<end>"])
    assert pieces == ["é", "!", "<endl", "e", "s", "s"]


def test_generate_stops_at_string_across_tokens(tiny):
    model, tokenizer = tiny
    unstopped = whet.generate(model, tokenizer, "hello", max_tokens=40)
    stop = unstopped[11:14]  # every token is one byte
    position = unstopped.index(stop)
    pieces = []
    truncated = whet.generate(
        model, tokenizer, "hello", max_tokens=40, stop=["never seen", stop], on_text=pieces.append
    )
    assert truncated == "".join(pieces) == unstopped[:position]
    assert whet.generate(model, tokenizer, "hello", max_tokens=40, stop=stop) == truncated


def test_empty_stop_string_is_rejected(tiny):
    with pytest.raises(ConfigError, match="an empty stop string"):
        whet.generate(*tiny, "hello", stop=["x", ""])


def test_empty_messages_are_rejected(tiny):
    with pytest.raises(DataError, match="the list of messages is empty"):
        whet.generate(*tiny, [])


@pytest.mark.parametrize("template", [None, "{{ messages[0]['content'] }}"])
def test_non_utf8_prompt_is_rejected(tiny, template):
    model, tokenizer = tiny[0], copy.deepcopy(tiny[1])
    tokenizer.chat_template = template
    with pytest.raises(DataError, match="the prompt is not UTF-8 text"):
        whet.generate(model, tokenizer, "h\udcffi")


def test_non_object_messages_are_rejected(tiny):
    with pytest.raises(DataError, match="messages must be objects"):
        whet.generate(*tiny, ["hi"])


def test_template_error_is_reported(tiny):
    model, tokenizer = tiny[0], copy.deepcopy(tiny[1])
    tokenizer.chat_template = "{{ messages[0]['content'] / 2 }}"
    with pytest.raises(DataError, match="the chat template rejects these messages: unsupported operand"):
        whet.generate(model, tokenizer, "hello")


def test_batches_stop_at_strings(tiny):
    model, tokenizer = tiny
    prompts = [encode_prompt(tokenizer, text) for text in ("hello", "good day", "a")]
    unstopped = complete(model, prompts, max_tokens=30, stop_tokens=set())
    texts = [tokenizer.decode(row.tokens, skip_special_tokens=True) for row in unstopped]
    stop = texts[1][8:10]
    completions = complete(
        model, prompts, max_tokens=30, stop_tokens=set(), watch=stop_watcher(tokenizer, [stop])
    )
    for text, row in zip(texts, completions, strict=True):
        assert row.finished == (stop in text)
        assert truncate_at_stop(
            tokenizer.decode(row.tokens, skip_special_tokens=True), [stop]
        ) == truncate_at_stop(text, [stop])


def test_best_of_n_by_likelihood_or_scorer(tiny):
    settings = {"max_tokens": 6, "seed": 3}
    answers = sample_answers(*tiny, "hello", 8, **settings)
    assert len({answer.text for answer in answers}) > 4
    assert best_of_n(*tiny, "hello", 8, **settings) == max(answers, key=lambda answer: answer.mean_logprob)
    scored = best_of_n(*tiny, "hello", 8, scorer=lambda text: -ord(text[0]), **settings)
    assert scored.text[0] == min(answer.text[0] for answer in answers)


def test_majority_vote_counts_keys(tiny):
    vote = majority_vote(*tiny, "hello", 12, key=lambda text: len(text) % 2, max_tokens=6, seed=3)
    odd = sum(len(answer.text) % 2 for answer in vote.answers)
    assert vote.votes == max(odd, 12 - odd)
    assert len(vote.answer.text) % 2 == (odd > 12 - odd)
    majority = [answer for answer in vote.answers if len(answer.text) % 2 == len(vote.answer.text) % 2]
    assert vote.answer.mean_logprob == max(answer.mean_logprob for answer in majority)
    no_votes = majority_vote(*tiny, "hello", 3, key=lambda text: None, max_tokens=6, seed=3)
    assert no_votes.votes == 0


@pytest.mark.parametrize(
    ("n", "settings", "message"),
    [(0, {}, "n=0 must be at least 1"), (2, {"sampling": whet.Sampling()}, "at temperature 0 all 2 answers")],
)
def test_invalid_n_is_rejected(tiny, n, settings, message):
    with pytest.raises(ConfigError, match=message):
        best_of_n(*tiny, "hello", n, **settings)


def test_stop_string_may_be_special_token(tiny_directory):
    _, tokenizer = whet.load(tiny_directory, device="cpu")
    tokens = tokenizer("Sure.<|user|>and now", add_special_tokens=False)["input_ids"]
    position = tokens.index(tokenizer.convert_tokens_to_ids("<|user|>"))
    emitted = []
    stream = TextStream(tokenizer, ["<|user|>"], emitted.append)
    for watch in (stop_watcher(tokenizer, ["<|user|>"]), stream.watch):
        assert [watch(0, tokens[: n + 1]) for n in range(position + 1)] == [True] * position + [False]
    assert stream.finish(tokens[: position + 1]) == "".join(emitted) == "Sure."


@pytest.mark.parametrize("stop", [(), "x"])
def test_prompt_without_tokenizer_is_rejected(tiny_directory, stop):
    model, _ = whet.load(tiny_directory, device="cpu")
    with pytest.raises(DataError, match="has no tokenizer"):
        whet.generate(model, None, "hello", stop=stop)
