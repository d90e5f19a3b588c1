"""The site shows every page once, and its reference pages are up to date."""

from pathlib import Path

import yaml
from tools.reference import PAGES

ROOT = Path(__file__).parents[1]


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name Python objects."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, suffix, node: suffix)


def pages_of(entries):
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            [value] = entry.values()
            yield from [value] if isinstance(value, str) else pages_of(value)


def test_navigation_lists_every_page_once():
    config = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=_Loader)
    listed = list(pages_of(config["nav"]))
    assert len(listed) == len(set(listed))
    assert set(listed) == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_reference_pages_are_up_to_date():
    for name, make in PAGES.items():
        assert (ROOT / "docs" / name).read_text() == make(), "run python -m tools.reference"
