"""The facts of a run's data in words: the same ones in a terminal and on a page."""

from whet.config.preset import Preset
from whet.data.inspect.data_facts import SHAPES_COUNTED, DataView, Sample, SplitFacts
from whet.data.inspect.step_facts import StepFacts

WordingRows = list[tuple[str, str]]


def model_line(view: DataView) -> str:
    """The model that will read it."""
    model = view.model
    if model is None:
        named = view.config.language_model
        return f"{named.preset} from scratch" if isinstance(named, Preset) else named
    known = {"parameters": model.parameters, "vocabulary": model.vocab_size, "context": model.max_positions}
    parts = [f"{name} {value:,}" for name, value in known.items() if value is not None]
    return ", ".join([model.name, *parts])


def tokenizer_rows(view: DataView) -> WordingRows:
    """The tokenizer, its special tokens and its chat template."""
    found = view.tokenizer
    if found is None:
        return []
    named = [f"{name} {token}" for name, token in found.special.items()] or ["no special tokens"]
    missing = [name for name in ("BOS", "EOS", "PAD") if name not in found.special and found.special]
    rows = [
        ("tokenizer", f"{found.size:,} tokens; {', '.join([*named, *(f'no {name}' for name in missing)])}")
    ]
    if found.template is None:
        return [*rows, ("template", "none: conversations cannot be read")]
    lines = found.template.count("\n") + 1
    return [*rows, ("template", f"{lines:,} line{'s' * (lines != 1)}, sha256 {found.template_digest}")]


def split_rows(split: SplitFacts, view: DataView) -> WordingRows:
    """Counts, lengths, what was lost, what is there twice. The first three rows are the sizes."""
    bad = f", and {split.skipped:,} bad" if split.skipped else ""
    learned = "" if split.is_judged else f", {split.supervised / split.tokens:.1%} of them learned"
    low, middle, high, top = split.lengths
    cut = [f"{count:,} {what}" for what, count in split.cut.items() if count]
    if split.refused:
        cut.append(f"{split.refused:,} refused")
    rows = [
        ("pairs" if split.pairs else "records", f"{split.records:,}{bad} ({_shapes(split, view)})"),
        (
            "tokens" if split.pairs else "examples",
            f"{'' if split.pairs else f'{split.examples:,}, '}{split.tokens:,} tokens{learned}",
        ),
        (
            "lengths",
            f"min {low:,}, median {middle:,}, 95% {high:,}, max {top:,} tokens "
            + ("per prompt with one answer" if split.pairs else "a record"),
        ),
        ("too long", f"{', '.join(cut) or 'none'} (data.max_length {view.config.data.max_length:,})"),
        ("duplicates", _twins(split.duplicates.count, split.duplicates.pair)),
    ]
    if split.classes:
        rows.append(("classes", split.classes))
    rows += [
        (f"in {each.learned}", _twins(each.twins.count, each.twins.pair))
        for each in view.overlaps
        if each.held == split.name
    ]
    if view.tokenizer is not None:
        rows += _ends(split, view.tokenizer.ends)
        if "BOS" in view.tokenizer.special:
            rows.append(("BOS twice", f"{split.doubled_bos:,}" if split.doubled_bos else "never"))
    return rows


def sample_title(sample: Sample) -> str:
    """Where a sample came from, what it is, and how long."""
    what = "".join(f", {each}" for each in (sample.kind, sample.place) if each)
    learned = f", {sample.supervised:,} learned" if sample.supervised else ""
    return f"{sample.origin}{what}: {sample.tokens:,} tokens{learned}"


def _shapes(split: SplitFacts, view: DataView) -> str:
    told = {shape: f"{shape}, {_way(shape, view)}" for shape in split.shapes}
    if len(told) == 1:
        return next(iter(told.values()))
    counted = "; ".join(f"{count:,} {told[shape]}" for shape, count in split.shapes.items())
    return f"{counted}; of the first {SHAPES_COUNTED:,}" if split.records > SHAPES_COUNTED else counted


def _way(shape: str, view: DataView) -> str:
    chat = view.tokenizer is not None and view.tokenizer.template is not None
    through = shape == "messages" or (shape in ("completion", "preference") and chat)
    return "through the chat template" if through else "without a template"


def _ends(split: SplitFacts, ends: tuple[str, ...]) -> WordingRows:
    if not ends:
        return [("end", "the tokenizer has no token that ends an answer")]
    if split.is_judged:
        return []
    what = "answers" if split.pairs else "examples"
    return [("end", f"{' or '.join(ends)} is learned in {split.ended:,} of {split.examples:,} {what}")]


def _twins(count: int, pair: tuple[str, str]) -> str:
    return f"{count:,}, such as {' = '.join(pair)}" if count else "none"


def step_rows(view: DataView) -> WordingRows:
    """The plan: how many steps, how large, how well filled."""
    plan, run = view.steps, view.config.run
    if view.prompts:
        count = f"{run.steps:,}" if run.steps else f"{run.epochs:,} epochs"
        return [
            *view.prompts,
            ("steps", count),
            ("a step", f"{run.batch_size:,} prompts, {view.completions:,} completions to each"),
            ("a completion", f"at most {view.completion_tokens:,} tokens"),
        ]
    if plan is None:
        return [("steps", "cannot be planned: see the problems")]
    unit = "pairs" if any(split.pairs for split in view.splits) else "examples"
    wanted = f"{run.batch_tokens:,} tokens" if run.batch_tokens else f"{run.batch_size:,} {unit}"
    passes = f"{plan.epochs:,.2f}".rstrip("0").rstrip(".")
    padding = f"{1 - plan.efficiency:.1%} of the positions" if plan.efficiency < 1 else "none"
    rows = [
        ("steps", f"{plan.steps:,} of at most {wanted}: {passes} epoch{'s' * (passes != '1')}"),
        ("an epoch", f"{plan.in_epoch:,} step{'s' * (plan.in_epoch != 1)}"),
        ("a step", f"{plan.examples_a_step:,.1f} {unit}, {plan.tokens_a_step:,.1f} tokens on average"),
        ("in all", f"about {plan.tokens:,} tokens"),
        ("micro-batches", f"{plan.micro_batches:,.1f} a step, of at most {plan.micro_tokens:,} tokens"),
        ("packing", _packing(plan) if view.config.data.pack else "off"),
        ("padding", padding),
    ]
    if view.held_out:
        left = f"; left: {view.classes_left}" if view.classes_left else ""
        rows.insert(0, ("held out", f"{view.held_out:,} of the training examples, for validation{left}"))
    if plan.measured < plan.in_epoch:
        rows.append(("", f"the last two were measured on the first {plan.measured:,} steps"))
    if plan.staged:
        rows.append(("", "measured without data.curriculum, which changes what is in a step"))
    return rows


def _packing(plan: StepFacts) -> str:
    held = plan.filled * plan.micro_tokens
    return f"{held:,.0f} tokens in a micro-batch ({plan.filled:.1%} of its room; unused room costs nothing)"
