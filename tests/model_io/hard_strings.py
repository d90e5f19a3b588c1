"""Texts on which tokenizers differ: scripts, spaces, digits, code, emoji, contractions, special tokens."""

import random
import unicodedata

PARTS = [
    *(" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n ", "\u00a0", "\u3000", "\u200b"),
    *("0", "7", "12", "123", "1234", "31415926", "3.14", "1,000,000", "½", "²", "٣", "Ⅷ"),
    *("don't", "I'LL", "we've", "'tis", "it's", "they're", "I'd", "L'été", "rock'n'roll", "\u2019s"),
    *("the", "The", "THE", "camelCase", "snake_case", "HTTPServer", "xXx", "naïve", "Straße", "ŒUVRE", "ﬁn"),
    *("東京", "中文字", "日本語のテキスト", "한국어", "Москва", "Ελλάδα", "עברית", "العربية", "हिन्दी", "ไทย"),
    *("😀", "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "e\u0301", "Å", "\u212b", "\U0001d54f"),
    *("def f(x):", "    return x**2", "if (a != b) { c++; }", "// ---", "#include <a.h>", "a[i]->b", "\\n"),
    *(".", ",", "!", "?!", "...", "…", "—", "-", "_", "/", "//", "://", "@", "#", "$", "%", "^", "&", "*", "(", ")"),
    *("[", "]", "{", "}", "<", ">", "|", "~", "`", '"', "'", "“", "”", "«", "»", "¿", "§", "€"),
    *("\x00", "\x01", "\x7f", "\ufeff", "\ufffd"),
]  # fmt: skip


def hard_strings(count=500, *, special=(), seed=0, composed=False, categories=""):
    """Return texts of random parts, optionally in NFC, and without characters of some Unicode categories."""
    rng = random.Random(seed)
    parts = [part for part in PARTS if not {unicodedata.category(each)[0] for each in part} & set(categories)]
    texts = []
    for _ in range(count):
        chosen = rng.choices([*parts, *special], k=rng.randrange(1, 12))
        text = rng.choice(["", "", " "]).join(chosen)
        texts.append(unicodedata.normalize("NFC", text) if composed else text)
    return texts
