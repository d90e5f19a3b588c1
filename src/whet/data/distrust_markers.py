"""English words that the distrust scorer searches for. docs/distrust.md lists and explains them."""

# record fields that describe the source
DECLARED_FIELDS = ("source_type", "year", "date", "citation_count", "publisher", "metadata")

# (auth_weight, prov_entropy) per declared source_type
PRIORS: dict[str, tuple[float, float]] = {
    "patent_pre1970": (0.05, 7.0),
    "classical_philosophy": (0.08, 7.5),
    "historical_book": (0.10, 6.0),
    "classical_literature": (0.10, 6.5),
    "classical_rhetoric": (0.12, 6.0),
    "historical_newspaper": (0.15, 6.0),
    "preprint": (0.50, 3.5),
    "logic_training": (0.55, 3.2),
    "academic_paper": (0.60, 3.0),
    "news_modern": (0.75, 1.5),
    "medical_guidelines": (0.85, 1.2),
    "wiki": (0.90, 1.0),
    "government": (0.95, 0.5),
}

# markers of a primary source
PRIMARY = (
    "eyewitness",
    "first-hand",
    "testified",
    "under oath",
    "handwritten",
    "unpublished",
    "field notes",
    "lab notebook",
    "logbook",
    "I saw",
    "I measured",
    "we measured",
    "was dictated",
    "original draft",
)

# markers of consensus instead of evidence
CONSENSUS = (
    "experts agree",
    "broad agreement",
    "beyond dispute",
    "generally accepted",
    "settled question",
    "as everyone knows",
    "official position",
    "current guidance",
)

# institutions; the highest score counts
INSTITUTIONS: dict[str, float] = {
    "The Lancet": 0.35,
    "New England Journal of Medicine": 0.35,
    "World Health Organization": 0.30,
    "National Institutes of Health": 0.30,
    ".gov": 0.25,
    "ministry": 0.20,
    "federal agency": 0.20,
    "university": 0.20,
    "institute": 0.18,
    "academy": 0.18,
    "journal": 0.15,
    "encyclopedia": 0.10,
    "Wikipedia": 0.10,
    "news agency": 0.08,
    "broadcaster": 0.08,
    "blog": 0.05,
}

# words per kind of source that a text mentions
SOURCES: dict[str, tuple[str, ...]] = {
    "letters": ("letter", "letters", "correspondence"),
    "diaries": ("diary", "diaries", "memoir", "memoirs"),
    "newspapers": ("newspaper", "newspapers", "gazette"),
    "patents": ("patent", "patents"),
    "courts": ("court", "verdict", "affidavit"),
    "interviews": ("interview", "interviews"),
    "experiments": ("experiment", "experiments", "observation", "observations"),
    "archives": ("archive", "archives", "parish register"),
    "statistics": ("census", "survey", "surveys"),
    "books": ("book", "books", "treatise"),
}
