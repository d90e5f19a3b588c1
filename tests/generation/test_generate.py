"""Stop strings end an answer before themselves, whatever the tokens; streaming shows nothing it must take back."""

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
from whet.generation.stop_strings import TextStream, cut, stop_watch


def stream_of(tokenizer, text, stops):
    """Feed the bytes of a text to a stream, one by one: the pieces shown, the answer, the tokens it took."""
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
        ("one two three", ["three", "o t"], "one tw"),  # the first to appear, not the first listed
        ("aab aac", ["aac"], "aab "),  # a start that turned out to be none is shown after all
        ("ends with a star*", ["**"], "ends with a star*"),
        ("naïve 東京 stop", ["京"], "naïve 東"),
        ("x\n\nUser: hi", ["\nUser:", "\n\nUser"], "x"),
    ],
)
def test_a_stream_is_cut_before_a_stop_string_and_never_shows_a_part_of_one(tiny, text, stops, expected):
    pieces, answer, used = stream_of(tiny[1], text, stops)
    assert answer == expected == cut(text, stops)
    assert "".join(pieces) == expected
    if expected != text:
        assert used < len(text.encode()) or text.endswith(tuple(stops)), (
            "it stops when the string is complete"
        )


def test_bytes_in_a_row_are_shown_when_no_other_can_change_them():
    """Tokenizers with a fallback read a row of bytes at once: one that is cut makes all of it unreadable."""
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


def test_a_prompt_goes_on_where_the_tokenizer_would_end_it(tiny):
    tokenizer = copy.deepcopy(tiny[1])
    tokenizer.chat_template = None
    eos, bare = tokenizer.eos_token, tokenizer("lazy")["input_ids"]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{eos} $A {eos}", special_tokens=[(eos, tokenizer.eos_token_id)]
    )
    [asked] = encode_records([Record({"prompt": "lazy", "completion": " dog"}, "here")], tokenizer)
    prompt = encode_prompt(tokenizer, "lazy")
    assert prompt == asked.tokens.tolist()[:5] == [tokenizer.eos_token_id, *bare]
    assert encode_prompt(tokenizer, f"lazy{eos}") == [*prompt, tokenizer.eos_token_id]  # the user's own stays


def test_text_appears_as_soon_as_it_is_certain(tiny):
    pieces, _, _ = stream_of(tiny[1], "é!<endless", ["<end>"])
    assert pieces == ["é", "!", "<endl", "e", "s", "s"]


def test_generate_stops_at_a_string_that_lies_across_tokens(tiny):
    model, tokenizer = tiny
    free = whet.generate(model, tokenizer, "hello", max_tokens=40)
    stop = free[11:14]  # every token is one byte
    place = free.index(stop)
    pieces = []
    found = whet.generate(
        model, tokenizer, "hello", max_tokens=40, stop=["never seen", stop], on_text=pieces.append
    )
    assert found == "".join(pieces) == free[:place]
    assert whet.generate(model, tokenizer, "hello", max_tokens=40, stop=stop) == found


def test_an_empty_stop_string_is_refused(tiny):
    with pytest.raises(ConfigError, match="an empty stop string"):
        whet.generate(*tiny, "hello", stop=["x", ""])


def test_no_messages_are_refused(tiny):
    with pytest.raises(DataError, match="there are no messages to answer"):
        whet.generate(*tiny, [])


@pytest.mark.parametrize("template", [None, "{{ messages[0]['content'] }}"])
def test_a_prompt_that_is_not_text_is_refused(tiny, template):
    model, tokenizer = tiny[0], copy.deepcopy(tiny[1])
    tokenizer.chat_template = template
    with pytest.raises(DataError, match="the prompt is not UTF-8 text"):
        whet.generate(model, tokenizer, "h\udcffi")


def test_messages_that_are_no_objects_are_refused(tiny):
    with pytest.raises(DataError, match="messages must be objects"):
        whet.generate(*tiny, ["hi"])


def test_what_a_template_refuses_is_an_error_that_says_so(tiny):
    model, tokenizer = tiny[0], copy.deepcopy(tiny[1])
    tokenizer.chat_template = "{{ messages[0]['content'] / 2 }}"
    with pytest.raises(DataError, match="the chat template rejects these messages: unsupported operand"):
        whet.generate(model, tokenizer, "hello")


def test_batches_stop_at_strings_too(tiny):
    model, tokenizer = tiny
    prompts = [encode_prompt(tokenizer, text) for text in ("hello", "good day", "a")]
    free = complete(model, prompts, max_tokens=30, stop_tokens=set())
    texts = [tokenizer.decode(row.tokens, skip_special_tokens=True) for row in free]
    stop = texts[1][8:10]
    found = complete(model, prompts, max_tokens=30, stop_tokens=set(), watch=stop_watch(tokenizer, [stop]))
    for text, row in zip(texts, found, strict=True):
        assert row.finished == (stop in text)
        assert cut(tokenizer.decode(row.tokens, skip_special_tokens=True), [stop]) == cut(text, [stop])


def test_best_of_n_takes_the_likeliest_or_the_best_scored(tiny):
    settings = {"max_tokens": 6, "seed": 3}
    answers = sample_answers(*tiny, "hello", 8, **settings)
    assert len({answer.text for answer in answers}) > 4
    assert best_of_n(*tiny, "hello", 8, **settings) == max(answers, key=lambda answer: answer.mean_logprob)
    scored = best_of_n(*tiny, "hello", 8, scorer=lambda text: -ord(text[0]), **settings)
    assert scored.text[0] == min(answer.text[0] for answer in answers)


def test_a_majority_vote_counts_what_the_key_reads(tiny):
    vote = majority_vote(*tiny, "hello", 12, key=lambda text: len(text) % 2, max_tokens=6, seed=3)
    odd = sum(len(answer.text) % 2 for answer in vote.answers)
    assert vote.votes == max(odd, 12 - odd)
    assert len(vote.answer.text) % 2 == (odd > 12 - odd)
    alike = [answer for answer in vote.answers if len(answer.text) % 2 == len(vote.answer.text) % 2]
    assert vote.answer.mean_logprob == max(answer.mean_logprob for answer in alike)
    nobody = majority_vote(*tiny, "hello", 3, key=lambda text: None, max_tokens=6, seed=3)
    assert nobody.votes == 0


@pytest.mark.parametrize(
    ("n", "settings", "message"),
    [(0, {}, "n=0: at least one"), (2, {"sampling": whet.Sampling()}, "at temperature 0 all 2 answers")],
)
def test_senseless_numbers_of_answers_are_refused(tiny, n, settings, message):
    with pytest.raises(ConfigError, match=message):
        best_of_n(*tiny, "hello", n, **settings)


def test_a_stop_string_may_be_a_special_token(tiny_directory):
    _, tokenizer = whet.load(tiny_directory, device="cpu")
    tokens = tokenizer("Sure.<|user|>and now", add_special_tokens=False)["input_ids"]
    place = tokens.index(tokenizer.convert_tokens_to_ids("<|user|>"))
    shown = []
    stream = TextStream(tokenizer, ["<|user|>"], shown.append)
    for watch in (stop_watch(tokenizer, ["<|user|>"]), stream.watch):
        assert [watch(0, tokens[: n + 1]) for n in range(place + 1)] == [True] * place + [False]
    assert stream.finish(tokens[: place + 1]) == "".join(shown) == "Sure."


@pytest.mark.parametrize("stop", [(), "x"])
def test_without_a_tokenizer_a_prompt_is_refused(tiny_directory, stop):
    model, _ = whet.load(tiny_directory, device="cpu")
    with pytest.raises(DataError, match="has no tokenizer"):
        whet.generate(model, None, "hello", stop=stop)
