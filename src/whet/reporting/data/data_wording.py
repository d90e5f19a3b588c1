"""The wording of data facts, shared by the text and the HTML view."""

from collections.abc import Iterator, Mapping

from whet.config.preset import Preset
from whet.data.inspect.data_facts import MAX_COUNTED_FORMATS, DataView, Sample, SplitFacts
from whet.data.inspect.step_facts import StepFacts
from whet.reporting.formatting import format_estimate, format_memory

WordingRows = list[tuple[str, str]]


def model_line(view: DataView) -> str:
    """Return the model's name with its parameter count, vocabulary size and context length."""
    model = view.model
    if model is None:
        model_name = view.config.language_model
        return f"{model_name.preset} from scratch" if isinstance(model_name, Preset) else model_name
    sizes = {"parameters": model.parameters, "vocabulary": model.vocab_size, "context": model.max_positions}
    parts = [f"{name} {value:,}" for name, value in sizes.items() if value is not None]
    return ", ".join([model.name, *parts])


def tokenizer_rows(view: DataView) -> WordingRows:
    """Return rows for the tokenizer, its special tokens and its chat template."""
    tokenizer = view.tokenizer
    if tokenizer is None:
        return []
    special = [f"{name} {token}" for name, token in tokenizer.special.items()] or ["no special tokens"]
    missing = [name for name in ("BOS", "EOS", "PAD") if name not in tokenizer.special and tokenizer.special]
    rows = [
        (
            "tokenizer",
            f"{tokenizer.size:,} tokens; {', '.join([*special, *(f'no {name}' for name in missing)])}",
        )
    ]
    if tokenizer.template is None:
        return [*rows, ("template", "none: chat messages cannot be used")]
    lines = tokenizer.template.count("\n") + 1
    rows.append(("template", f"{lines:,} line{'s' * (lines != 1)}, sha256 {tokenizer.template_digest}"))
    if tokenizer.probe is not None:
        rows.append(("", "; ".join(tokenizer.probe.describe())))
    return rows


def split_rows(split: SplitFacts, view: DataView) -> WordingRows:
    """Return rows for counts, lengths, truncation and duplicates; the first three are the sizes."""
    bad = f", and {split.skipped:,} bad" if split.skipped else ""
    supervised = "" if split.is_classification else f", {split.supervised / split.tokens:.1%} supervised"
    shortest, median, p95, longest = split.lengths
    too_long = [f"{count:,} {action}" for action, count in split.shortened.items() if count]
    if split.too_long_count:
        too_long.append(f"{split.too_long_count:,} rejected")
    cut = f"; {split.cut_tokens:,} tokens cut" if split.cut_tokens and not split.too_long_count else ""
    cut += f", {split.cut_supervised:,} of them supervised" if cut and not split.is_classification else ""
    rows = [
        ("pairs" if split.pairs else "records", f"{split.records:,}{bad} ({_shapes(split, view)})"),
        (
            "tokens" if split.pairs else "examples",
            f"{'' if split.pairs else f'{split.examples:,}, '}{split.tokens:,} tokens{supervised}",
        ),
        (
            "lengths",
            f"min {shortest:,}, median {median:,}, p95 {p95:,}, max {longest:,} tokens "
            + ("per prompt with one completion" if split.pairs else "per record"),
        ),
        (
            "too long",
            f"{', '.join(too_long) or 'none'} (data.max_length {view.config.data.max_length:,}){cut}",
        ),
        ("duplicates", _duplicates(split.duplicates.count, split.duplicates.pair)),
    ]
    rows += _source_rows(split)
    if split.split is not None:
        rows.insert(3, ("turns", split.split))
    if split.weights is not None:
        rows.append(("weights", _weights(split.weights)))
    if split.classes:
        rows.append(("classes", split.classes))
    rows += [
        (f"also in {each.training_split}", _duplicates(each.duplicates.count, each.duplicates.pair))
        for each in view.overlaps
        if each.held_out_split == split.name
    ]
    if view.tokenizer is not None:
        rows += _end_token_rows(split, view.tokenizer.end_tokens)
        if "BOS" in view.tokenizer.special:
            rows.append(("double BOS", f"{split.doubled_bos:,}" if split.doubled_bos else "none"))
    return rows


def _source_rows(split: SplitFacts) -> Iterator[tuple[str, str]]:
    if len(split.sources) < 2:
        return
    totals = [max(1, total) for total in (split.records, split.tokens, split.supervised)]
    for index, share in enumerate(split.sources):
        names = ("records", "tokens") if split.is_classification else ("records", "tokens", "supervised")
        counts = (share.records, share.tokens, share.supervised)
        shares = [
            f"{count:,} {name} ({count / total:.1%})"
            for name, count, total in zip(names, counts, totals, strict=False)
        ]
        yield "" if index else "sources", f"{share.name}: {', '.join(shares)}"


def _weights(counts: Mapping[float, int]) -> str:
    """Return how many supervised tokens have each loss weight; a long list without its middle."""
    items = [f"{weight:g} on {count:,} tokens" for weight, count in counts.items()]
    middle = [f"{len(items) - 6:,} other weights"] if len(items) > 7 else []
    shown = [*items[:3], *middle, *items[-3:]] if middle else items
    total = sum(weight * count for weight, count in counts.items())
    return f"{', '.join(shown)}; sum {total:,.6g}"


def sample_title(sample: Sample) -> str:
    """Return a sample's origin, kind and length."""
    details = "".join(f", {each}" for each in (sample.kind, sample.token_range) if each)
    supervised = f", {sample.supervised:,} supervised" if sample.supervised else ""
    return f"{sample.origin}{details}: {sample.tokens:,} tokens{supervised}"


def _shapes(split: SplitFacts, view: DataView) -> str:
    descriptions = {shape: f"{shape}, {_rendering(shape, view)}" for shape in split.record_formats}
    if len(descriptions) == 1:
        return next(iter(descriptions.values()))
    counted = "; ".join(f"{count:,} {descriptions[shape]}" for shape, count in split.record_formats.items())
    return (
        f"{counted}; of the first {MAX_COUNTED_FORMATS:,}" if split.records > MAX_COUNTED_FORMATS else counted
    )


def _rendering(shape: str, view: DataView) -> str:
    has_template = view.tokenizer is not None and view.tokenizer.template is not None
    is_rendered = shape == "messages" or (shape in ("completion", "preference") and has_template)
    return "with the chat template" if is_rendered else "without a chat template"


def _end_token_rows(split: SplitFacts, ends: tuple[str, ...]) -> WordingRows:
    if not ends:
        return [("end token", "none: the tokenizer has no end-of-sequence token")]
    if split.is_classification:
        return []
    unit = "completions" if split.pairs else "examples"
    count = f"{split.with_supervised_end:,} of {split.examples:,} {unit}"
    return [("end token", f"{' or '.join(ends)} is supervised in {count}")]


def _duplicates(count: int, pair: tuple[str, str]) -> str:
    return f"{count:,}, such as {' = '.join(pair)}" if count else "none"


def step_rows(view: DataView) -> WordingRows:
    """Return rows for the number of steps, their size, packing and padding."""
    plan, run = view.steps, view.config.run
    if view.prompts:
        count = f"{run.steps:,}" if run.steps else f"{run.epochs:,} epochs"
        return [
            *view.prompts,
            ("steps", count),
            ("per step", f"{run.batch_size:,} prompts, {view.completions:,} completions each"),
            ("completions", f"at most {view.completion_tokens:,} tokens"),
        ]
    if plan is None:
        return [("steps", "unknown, see the problems below")]
    unit = "pairs" if any(split.pairs for split in view.splits) else "examples"
    limit = f"{run.batch_tokens:,} tokens" if run.batch_tokens else f"{run.batch_size:,} {unit}"
    passes = f"{plan.epochs:,.2f}".rstrip("0").rstrip(".")
    padding = f"{1 - plan.efficiency:.1%} of the positions" if plan.efficiency < 1 else "none"
    rows = [
        ("steps", f"{plan.steps:,} of at most {limit}: {passes} epoch{'s' * (passes != '1')}"),
        ("epoch", _epoch(plan)),
        ("per step", f"{plan.examples_per_step:,.1f} {unit}, {plan.tokens_per_step:,.1f} tokens on average"),
        ("total", f"about {plan.tokens:,} tokens"),
        ("micro-batches", f"{plan.micro_batches:,.1f} per step, of at most {plan.micro_tokens:,} tokens"),
        ("packing", _packing(plan) if view.config.data.pack else "off"),
        ("padding", padding),
    ]
    rows += cost_rows(view)
    if view.held_out:
        remaining = f"; remaining: {view.remaining_classes}" if view.remaining_classes else ""
        rows.insert(0, ("held out", f"{view.held_out:,} of the training examples, for validation{remaining}"))
    if plan.measured < plan.steps_per_epoch:
        rows.append(("", f"packing and padding were measured on the first {plan.measured:,} steps"))
    if plan.has_curriculum:
        rows.append(("", "measured without data.curriculum, which changes the contents of the steps"))
    if plan.is_streamed and (stream := view.config.data.stream) is not None:
        rows[:2] = [("steps", f"{plan.steps:,} of at most {limit}")]  # without epochs
        rows.append(("stream", f"all of the above was measured on the first {stream.buffer:,} records"))
    return rows


def _epoch(plan: StepFacts) -> str:
    text = (
        f"{plan.steps_per_epoch:,} step{'s' * (plan.steps_per_epoch != 1)}, {plan.tokens_per_epoch:,} tokens"
    )
    if plan.supervised_per_epoch is None:
        return text
    share = plan.supervised_per_epoch / max(1, plan.tokens_per_epoch)
    return f"{text}, {plan.supervised_per_epoch:,} of them supervised ({share:.1%})"


def cost_rows(view: DataView) -> WordingRows:
    """Return rows for the time and memory on a device, if one was named."""
    cost, plan = view.cost, view.steps
    if cost is None or plan is None:
        return []
    epoch, run = (format_estimate(steps * cost.step_s) for steps in (plan.steps_per_epoch, plan.steps))
    time = f"{cost.step_s:.3g} s per step, {epoch} per epoch, {run} in total"
    return [
        ("time", f"{time} on {cost.device}, at {cost.utilization:.0%} of peak FLOP/s"),
        ("memory", f"{format_memory(cost.peak_bytes)} of {format_memory(cost.memory_bytes)}"),
    ]


def _packing(plan: StepFacts) -> str:
    tokens = plan.micro_batch_fill * plan.micro_tokens
    capacity = f"{plan.micro_batch_fill:.1%} of its limit; unused capacity costs nothing"
    return f"{tokens:,.0f} tokens per micro-batch ({capacity})"
