"""The documentation is correct: its configs, Python code, commands and links work, and it lists every config key.

The first word of a fenced block is its type: `yaml` (a complete config; after a line `<!-- fragment -->`, some sections
of one), `python` (run from top to bottom of a page; after `<!-- evals -->`, by the tests of lm-eval), `bash` (the whet and make commands are parsed). A title, as in
`jsonl title="train.jsonl"`, is the name of a file to write for the page's Python code. `python tests/test_docs.py` prints the
tables of docs/config.md.
"""

import contextlib
import itertools
import json
import math
import re
import shlex
import tomllib
import types
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import pytest
import typer
from pydantic import BaseModel

from whet.cli.app import app
from whet.config.load_config import load_config, validate_config
from whet.config.objectives.mix import Part
from whet.config.preset import Preset
from whet.config.quality import Quality
from whet.config.run_config import RunConfig
from whet.data.synthetic.generators import GENERATORS
from whet.runs.resume_checks import CHANGEABLE_KEYS
from whet.studies.sweep import plan_sweep

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("README.md")])
MODEL = "smollm2-135m-instruct"
BASE = {
    "model": MODEL,
    "data": {"train": "train.jsonl", "valid": "valid.jsonl"},
    "run": {"steps": 1, "batch_size": 1},
}


class Fence(NamedTuple):
    page: Path
    line: int
    info: list[str]
    text: str

    def __str__(self):
        return f"{self.page.name}-{self.line}"


def fences(page):
    """Return the fenced blocks of a page."""
    blocks_of_page, info, start, lines = [], None, 0, []
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if not line.startswith("```"):
            lines.append(line)
        elif info is None:
            mark = re.findall(r"^<!-- (fragment|evals) -->$", "".join(lines[-1:]))
            words = re.sub(r'title="([^"]*)"', r"\1", line.removeprefix("```")).split()
            info, start, lines = [*words, *mark], number, []
        else:
            blocks_of_page.append(Fence(page, start, info, "\n".join(lines) + "\n"))
            info = None
    assert info is None, f"{page}:{start}: the block is not closed"
    return blocks_of_page


def blocks(kind):
    return [fence for page in PAGES for fence in fences(page) if fence.info[:1] == [kind]]


def over_base(sections):
    """Return a complete config: the given sections merged into a minimal config."""
    config = dict(BASE)
    for name, keys in sections.items():
        mergeable = isinstance(keys, dict) and isinstance(config.get(name, {}), dict)
        config[name] = {**config.get(name, {}), **keys} if mergeable else keys
    run = config["run"]  # epochs or tokens in a fragment replace the steps or examples of the base
    for key, replaced in (("epochs", "steps"), ("batch_tokens", "batch_size")):
        if key in run:
            config["run"] = run = {name: value for name, value in run.items() if name != replaced}
    return config


def test_docs_have_blocks_of_every_type():
    assert all(blocks(kind) for kind in ("yaml", "python", "bash"))


@pytest.mark.parametrize("fence", blocks("yaml"), ids=str)
def test_configs_are_valid(fence, tmp_path):
    if "fragment" in fence.info:
        import yaml

        validate_config(over_base(yaml.safe_load(fence.text)), origin=str(fence))
        return
    path = tmp_path / "config.yaml"
    path.write_text(fence.text)
    load_config(path)


PACKED = {
    "packing=True": ("per_device_train_batch_size=", "gradient_accumulation_steps=", "max_length="),
    "packed: True": ("batch_size: ", "gradient_accumulation_steps: ", "max_seq_len: "),
    "sample_packing: true": ("micro_batch_size: ", "gradient_accumulation_steps: ", "sequence_len: "),
    "neat_packing: true": (
        "per_device_train_batch_size: ",
        "gradient_accumulation_steps: ",
        "cutoff_len: ",
    ),
}


@pytest.mark.parametrize(("word", "keys"), list(PACKED.items()))
def test_packed_batch_size_of_other_tools_maps_to_batch_tokens(word, keys, tmp_path):
    """With packing, their batch size counts full rows, while whet's counts examples."""
    page = fences(ROOT / "docs" / "coming-from.md")
    [(theirs, ours)] = [pair for pair in itertools.pairwise(page) if word in pair[0].text]
    numbers = [int(re.search(rf"{key}(\d+)", theirs.text)[1]) for key in keys]
    (tmp_path / "config.yaml").write_text(ours.text)
    run = load_config(tmp_path / "config.yaml").run
    assert (run.batch_tokens, run.batch_size) == (math.prod(numbers), None)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p in {f.page for f in blocks("python")}], ids=lambda p: p.stem
)
def test_python_runs(page, tmp_path, monkeypatch, tiny_directory):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for fence in fences(page):
        text = fence.text.replace(MODEL, str(tiny_directory))
        if len(fence.info) > 1 and "." in fence.info[1] and "/" not in fence.info[1]:
            (tmp_path / fence.info[1]).write_text(text)
        if fence.info == ["python"]:
            # blank lines in front make a traceback show the line of the page
            exec(compile("\n" * fence.line + text, str(page), "exec"), namespace)


def shell_lines():
    """Yield each command of the bash blocks as words, without leading variables and pipes."""
    for fence in blocks("bash"):
        for line in fence.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            for end in ("|", "&&", ";", ">"):
                words = words[: words.index(end)] if end in words else words
            if words:
                yield pytest.param(words, id=f"{fence}-{'-'.join(words)[:40]}")


def test_docs_show_whet_make_and_pip():
    programs = {Path(line.values[0][0]).name for line in shell_lines()}
    assert {"whet", "make", "pip"} <= programs


@pytest.mark.parametrize("words", list(shell_lines()))
def test_commands_exist(words, tmp_path):
    program, *arguments = words
    if Path(program).name == "whet":
        check_whet(arguments, tmp_path)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
        assert {word for word in arguments if "=" not in word} <= set(targets)
    for word in words:
        if word.startswith(("examples/", "tests/", "docs/")):
            assert (ROOT / word).exists()


def check_whet(arguments, tmp_path):
    """Check that command, arguments and options exist and the overrides are valid, without running it."""
    group = typer.main.get_command(app)
    with contextlib.suppress(typer.Exit):  # --help prints and ends
        context = group.make_context("whet", list(arguments))
        words = [word for word in arguments if word != "--debug"]
        name, command, rest = group.resolve_command(context, words)
        parsed = command.make_context(name, rest, parent=context)
        (tmp_path / "base.yaml").write_text(json.dumps(BASE))  # JSON is YAML
        if name == "sweep":
            params = parsed.params
            plan_sweep(
                tmp_path / "base.yaml", params["settings"], seeds=params["seeds"], draws=params["random"]
            )
        if overrides := parsed.params.get("overrides"):
            load_config(tmp_path / "base.yaml", overrides)


def test_config_page_lists_every_key_with_default_and_description():
    page = (ROOT / "docs" / "config.md").read_text()
    for table in key_tables():
        assert table in page, f"docs/config.md lacks this table; run `python tests/test_docs.py`:\n\n{table}"
    rows = re.findall(r"^\| `([a-z0-9_.]+)` \|", page, flags=re.M)
    assert len(rows) == sum(table.count("\n| `") for table in key_tables())  # and no unknown keys


def test_lists_in_docs_are_complete():
    pages = {page.stem: page.read_text() for page in PAGES}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [name for name in GENERATORS if f"`synth:{name}`" not in pages["data"]] == []
    assert [name for name in extras if f"`{name}`" not in pages["install"]] == []
    resume = pages["runs"].partition("## Resume")[2].partition("\n## ")[0]
    last = [key.rpartition(".")[2] for key in CHANGEABLE_KEYS if not key.startswith("run.budget.")]
    assert [key for key in last if not re.search(rf"`([a-z]+\.)?{key}`", resume)] == []


def key_tables():
    """Yield a table for each config section, generated from its class."""
    yield table("Top level", {"model": RunConfig.model_fields["model"]}, "The model to train.")
    yield from section_tables("model", Preset)
    yield from section_tables("model", Quality, title="`model` (quality)")
    for name, field in RunConfig.model_fields.items():
        if name == "objective":
            for section in sections_of(field.annotation):
                kinds = ", ".join(get_args(section.model_fields["kind"].annotation)) or "custom"
                yield from section_tables(name, section, title=f"`{name}` ({kinds})")
        elif name != "model":
            yield from section_tables(name, field.annotation)


def sections_of(kind):
    """Return the sections of a union, including nested unions."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [section for inner in get_args(kind) for section in sections_of(inner)]


def section_tables(name, section, title=None):
    keys = {f"{name}.{field.alias or key}": field for key, field in section.model_fields.items()}
    yield table(title or f"`{name}`", keys, section.__doc__)
    if section is Part:  # its subsections are those of a run, which have their own tables
        return
    for key, field in keys.items():
        for kind in get_args(field.annotation):
            inner = (get_args(kind) or (kind,))[-1]  # the item type of a list
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from section_tables(key, inner)


def table(title, fields, description):
    rows = [
        f"| `{key}` | {values(field.annotation, field.metadata)} | {default(field)} | {field.description} |"
        for key, field in fields.items()
    ]
    return "\n".join(
        [
            f"### {title}\n\n{description}\n\n| key | values | default | description |",
            "|---|---|---|---|",
            *rows,
        ]
    )


def default(field):
    return "required" if field.is_required() else f"`{json.dumps(field.get_default())}`"


def values(kind, limits=()):
    """Return the accepted values of a type, in words."""
    if get_origin(kind) is Annotated:
        kind, *limits = get_args(kind)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) in (types.UnionType, Union):
        return " or ".join(dict.fromkeys(values(inner, limits) for inner in get_args(kind)))
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "section"
    if get_origin(kind) is dict:
        inner = values(get_args(kind)[1])
        return "mapping of sections" if inner == "section" else f"mapping to {inner}"
    if kind is Any:
        return "any value"
    names = {int: "integer", float: "number", str: "string", bool: "`true`, `false`", type(None): "`null`"}
    if get_origin(kind) is list:
        plurals = {
            "integer": "list of integers",
            "string": "list of strings",
            "number": "list of numbers",
            "section": "list of sections",
        }
        inner = values(*get_args(kind))
        return plurals.get(inner, f"list of {inner}")
    if get_origin(kind) is tuple:
        return "two numbers" + bounds(get_args(get_args(kind)[0])[1:])
    return names[kind] + (bounds(limits) if kind in (int, float) else "")


def bounds(limits):
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    flat = [inner for limit in limits for inner in getattr(limit, "metadata", [limit])]
    conditions = [
        f"{sign} {getattr(limit, name)}"
        for limit in flat
        for name, sign in signs.items()
        if hasattr(limit, name)
    ]
    return " " + " and ".join(conditions) if conditions else ""


def links():
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if not target.startswith(("http://", "https://", "mailto:")):
                yield pytest.param(page, target, id=f"{page.name}-{target}")


@pytest.mark.parametrize(("page", "target"), list(links()))
def test_links_are_valid(page, target):
    path, _, anchor = target.partition("#")
    linked = page.parent / path if path else page
    assert linked.exists()
    if anchor:
        headings = re.findall(r"^#+ (.*)$", linked.read_text(), flags=re.M)
        assert anchor in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


if __name__ == "__main__":
    print("\n\n".join(key_tables()))
