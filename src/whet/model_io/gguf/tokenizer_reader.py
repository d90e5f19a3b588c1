"""Rebuild the tokenizer of a GGUF file as a Hugging Face tokenizer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from whet.error_boundary import invalid_input_errors
from whet.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's visible space
_PHI3_NAMES, _KEEP_SPACES = ("phi-3", "phi3"), ("<unk>", "<s>", "<|endoftext|>")
# characters per piece: every way to split a piece in two is tried, which a malicious file could make endless
_MAX_PIECE = 512

# Contractions, letters with the character before them, digits, punctuation, line ends, spaces.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
# The same, but a word also ends before an uppercase letter that follows a lowercase one.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)


@dataclass(frozen=True)
class GgufTokenizer:
    """A tokenizer, its tokenizer_config.json, and the special token ids for config.json."""

    tokenizer: Tokenizer
    config: dict[str, object]
    ids: dict[str, int | list[int]]


@dataclass(frozen=True)
class PreTokenizerSplit:
    """How a kind of byte-level BPE splits text before merging."""

    pre_tokenizer: pre_tokenizers.PreTokenizer
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False
    starts_with_bos: bool = False


def splits() -> dict[str, PreTokenizerSplit]:
    """Return the supported pre-tokenizers by their names in GGUF files."""
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)

    def split(pattern: str) -> pre_tokenizers.PreTokenizer:
        parts = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([parts, bytes_only])

    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    cased = _CASED_WORDS % ("", "", "")
    cased_with_contractions = _CASED_WORDS % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", "{1,3}")
    return {
        "default": PreTokenizerSplit(gpt2),
        "gpt-2": PreTokenizerSplit(gpt2),
        "olmo": PreTokenizerSplit(gpt2, normalizer=normalizers.NFC()),
        "llama-bpe": PreTokenizerSplit(split(_WORDS % "{1,3}"), ignore_merges=True, starts_with_bos=True),
        "dbrx": PreTokenizerSplit(split(_WORDS % "{1,3}")),
        "qwen2": PreTokenizerSplit(split(_WORDS % ""), normalizer=normalizers.NFC()),
        "deepseek-r1-qwen": PreTokenizerSplit(split(_WORDS % "")),
        "smollm": PreTokenizerSplit(digits),
        "refact": PreTokenizerSplit(digits),
        "starcoder": PreTokenizerSplit(digits),
        "tekken": PreTokenizerSplit(split(cased), ignore_merges=True),
        "gpt-4o": PreTokenizerSplit(split(cased_with_contractions)),
    }


def is_phi3_name(name: str) -> bool:
    """Return whether llama.cpp removes the spaces after special tokens of a model of this name."""
    return any(part in name.lower() for part in _PHI3_NAMES)


class _Vocabulary:
    """The token lists of a GGUF file, checked to have the same length and no duplicates."""

    def __init__(self, metadata: Mapping[str, object], source: str, vocab_size: int) -> None:
        self.metadata = metadata
        self.source = source
        self.tokens = self.strings("tokens")
        if len(self.tokens) > vocab_size:
            raise self.error(f"there are {len(self.tokens)} tokens, but the embedding has {vocab_size} rows")
        self.types = self.numbers("token_type") or [NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise self.error(f"there are {len(self.tokens)} tokens, but {len(self.types)} token types")
        self.rows = used = len(self.tokens)
        while used and self.types[used - 1] == UNUSED:  # embedding rows without a token
            used -= 1
        self.tokens, self.types = self.tokens[:used], self.types[:used]

    def error(self, problem: str, hint: str | None = None) -> ModelError:
        return ModelError(f"{self.source}: the tokenizer cannot be read: {problem}", hint=hint)

    def get(self, key: str) -> object:
        return self.metadata.get(f"tokenizer.ggml.{key}")

    def strings(self, key: str) -> list[str]:
        values = self.get(key)
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self.error(f"tokenizer.ggml.{key} is not a list of strings")
        return values

    def numbers(self, key: str) -> list[float]:
        values = self.get(key) or []
        if not isinstance(values, list) or not all(isinstance(value, int | float) for value in values):
            raise self.error(f"tokenizer.ggml.{key} is not a list of numbers")
        return values

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.get(key)
        return value if isinstance(value, bool) else default

    def special_id(self, role: str) -> int | None:
        value = self.get(f"{role}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self.error(
                f"tokenizer.ggml.{role}_token_id is {value!r}, not one of {len(self.tokens)} tokens"
            )
        return value

    def by_text(self, texts: Sequence[str]) -> dict[str, int]:
        vocab = {text: index for index, text in enumerate(texts)}
        if len(vocab) != len(texts):
            repeated = next(text for index, text in enumerate(texts) if vocab[text] != index)
            raise self.error(f"the token {repeated!r} appears twice")
        return vocab


def build_tokenizer(
    metadata: Mapping[str, object], *, source: str, vocab_size: int, max_length: int
) -> GgufTokenizer:
    """Build the tokenizer that the metadata of the GGUF file `source` describes."""
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece, "t5": _unigram}
    if not isinstance(kind, str) or kind not in builders:
        raise ModelError(
            f"{source}: the tokenizer {kind!r} is not supported" if kind else f"{source} has no tokenizer",
            hint="supported: gpt2 (byte-level BPE), llama (SentencePiece BPE), t5 (Unigram)",
        )
    vocabulary = _Vocabulary(metadata, source, vocab_size)
    # the tokenizers package raises plain Exceptions, and Rust panics
    with invalid_input_errors(f"{source}: the tokenizer cannot be read"):
        return _build(vocabulary, builders[kind], max_length=max_length)


def _build(
    vocabulary: _Vocabulary, build: Callable[[_Vocabulary], tuple[Tokenizer, bool]], *, max_length: int
) -> GgufTokenizer:
    tokenizer, add_bos = build(vocabulary)
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {role: vocabulary.special_id(gguf_role) for role, gguf_role in roles.items()}
    _add_tokens(tokenizer, vocabulary, named={index for index in ids.values() if index is not None})
    named = {role: tokenizer.id_to_token(index) for role, index in ids.items() if index is not None}
    add_bos = "bos" in named and vocabulary.flag("add_bos_token", default=add_bos)
    add_eos = "eos" in named and vocabulary.flag("add_eos_token", default=False)
    _set_bos_and_eos(tokenizer, bos=named["bos"] if add_bos else None, eos=named["eos"] if add_eos else None)
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        **{f"{role}_token": text for role, text in named.items()},
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    template = vocabulary.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    extra_ends = [vocabulary.special_id(role) for role in ("eot", "eom")]
    return GgufTokenizer(tokenizer, config, _config_ids(ids, extra_ends=extra_ends))


def _config_ids(
    ids: Mapping[str, int | None], *, extra_ends: Sequence[int | None]
) -> dict[str, int | list[int]]:
    named: dict[str, int | list[int]] = {
        f"{role}_token_id": index for role, index in ids.items() if index is not None and role != "unk"
    }
    # chat models have different tokens for the end of a turn, a message and a document
    ends = list(dict.fromkeys(index for index in (ids["eos"], *extra_ends) if index is not None))
    if ids["eos"] is not None and len(ends) > 1:
        named["eos_token_id"] = ends
    return named


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    known = splits()
    name = vocabulary.get("pre") or "default"
    split = known.get(name) if isinstance(name, str) else None
    if split is None:
        raise vocabulary.error(
            f"the pre-tokenizer tokenizer.ggml.pre={name!r} is not supported",
            hint=f"supported: {', '.join(known)}",
        )
    merges: list[tuple[str, str]] = []
    for line in vocabulary.strings("merges"):
        left, _, right = line.partition(" ")
        if not left or not right:
            raise vocabulary.error(f"the merge {line!r} is not two tokens separated by a space")
        merges.append((left, right))
    model = models.BPE(vocabulary.by_text(vocabulary.tokens), merges, ignore_merges=split.ignore_merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = split.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if split.normalizer is not None:
        tokenizer.normalizer = split.normalizer
    return tokenizer, split.starts_with_bos


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    # user-defined tokens are matched in the raw text, before its spaces are replaced
    texts = [
        text.replace(SPACE, " ") if kind == USER_DEFINED else text
        for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]
    vocab = vocabulary.by_text(texts)
    unknown = vocabulary.special_id("unknown")
    if unknown is None and UNKNOWN in vocabulary.types:
        unknown = vocabulary.types.index(UNKNOWN)
    model = models.BPE(
        vocab,
        _merges_by_score(vocabulary),
        unk_token=None if unknown is None else texts[unknown],
        fuse_unk=True,
        byte_fallback=BYTE in vocabulary.types,
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    decoding_steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flag("add_space_prefix", default=True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        tokenizer.decoder = decoders.Sequence([*decoding_steps, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = spaces
        tokenizer.decoder = decoders.Sequence(decoding_steps)
    return tokenizer, True


def _unigram(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    scores = vocabulary.numbers("scores")
    if len(scores) != vocabulary.rows:
        raise vocabulary.error(f"there are {vocabulary.rows} tokens, but {len(scores)} scores")
    unknown = vocabulary.special_id("unknown")
    if unknown is None and UNKNOWN in vocabulary.types:
        unknown = vocabulary.types.index(UNKNOWN)
    vocabulary.by_text(vocabulary.tokens)  # raises if a token appears twice
    tokenizer = Tokenizer(
        models.Unigram(list(zip(vocabulary.tokens, map(float, scores), strict=False)), unknown, False)
    )
    steps: list[normalizers.Normalizer] = []
    if charsmap := vocabulary.get("precompiled_charsmap"):
        assert isinstance(charsmap, list | bytes)
        steps.append(normalizers.Precompiled(bytes(value % 256 for value in charsmap)))
    # as in llama.cpp, which adds a space also to a text that starts with one
    merges_spaces = vocabulary.flag("remove_extra_whitespaces", default=False)
    if merges_spaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    has_prefix = merges_spaces or vocabulary.flag("add_space_prefix", default=True)
    if has_prefix:
        steps.append(normalizers.Prepend(" "))
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "never")
    tokenizer.decoder = decoders.Metaspace(SPACE, "always" if has_prefix else "never")
    return tokenizer, False


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return every split of every piece as a merge, the highest score first.

    SentencePiece merges the pair whose union has the highest score.
    """
    scores = vocabulary.numbers("scores")
    if len(scores) != vocabulary.rows:
        raise vocabulary.error(f"there are {vocabulary.rows} tokens, but {len(scores)} scores")
    pieces = {
        text: score
        for text, score, kind in zip(vocabulary.tokens, scores, vocabulary.types, strict=False)
        if kind == NORMAL
    }
    longest = max(pieces, key=len, default="")
    if len(longest) > _MAX_PIECE:
        raise vocabulary.error(f"a token has {len(longest)} characters, but {_MAX_PIECE} is the maximum")
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(pieces, key=lambda text: -pieces[text])
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]


def _add_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary, *, named: set[int]) -> None:
    """Add control and user-defined tokens, which are matched before the text is split."""
    special: list[AddedToken] = []
    plain: list[AddedToken] = []
    removes_spaces = is_phi3_name(str(vocabulary.metadata.get("general.name")))
    for index, kind in enumerate(vocabulary.types):
        is_special = kind in (CONTROL, UNKNOWN) or index in named
        if is_special or kind == USER_DEFINED:
            text = tokenizer.id_to_token(index)
            if not text:
                raise vocabulary.error(f"the special token {index} has no text")
            strips = removes_spaces and text not in _KEEP_SPACES
            token = AddedToken(text, special=is_special, normalized=False, rstrip=strips)
            (special if is_special else plain).append(token)
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _set_bos_and_eos(tokenizer: Tokenizer, *, bos: str | None, eos: str | None) -> None:
    """Make the tokenizer add BOS and EOS tokens to every text, if given."""
    if bos is None and eos is None:
        return
    template = [*([f"{bos}:{{n}}"] if bos else []), "${name}:{n}", *([f"{eos}:{{n}}"] if eos else [])]
    first, second = (
        [part.replace("{n}", type_id).replace("{name}", name) for part in template]
        for type_id, name in (("0", "A"), ("1", "B"))
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=first,
        pair=first + second,
        special_tokens=[(text, tokenizer.token_to_id(text)) for text in (bos, eos) if text],
    )
