"""Digests of functions and objects: stable across processes, and different for different code."""

import functools
import json
import os
import subprocess
import sys

import pytest

from whet.given.object_digests import object_digest

MODULE = '''
import functools

def plain(prompt, completion, record):
    """Say something."""
    return 1.0 if completion in {"a", "b", "c", "d"} else 0.0

def make(scale):
    def inner(completion):
        return scale * len(completion)
    return inner

class Bonus:
    def __init__(self, scale):
        self.scale = scale
        self.cache = object()

    def __call__(self, completion):
        return self.scale * len(completion)

    def method(self, completion):
        return 0

objects = {
    "plain": plain,
    "closure": make(1),
    "closure 2": make(2),
    "instance": Bonus(1),
    "instance 2": Bonus(2),
    "class": Bonus,
    "method": Bonus(1).method,
    "partial": functools.partial(plain, "prompt"),
    "partial 2": functools.partial(plain, "other"),
    "lambda": lambda completion: completion in {"a", "b", "c"},
    "lambda 2": lambda completion: completion in {"a", "b", "x"},
    "nested": lambda texts: sorted(texts, key=lambda text: text[::-1]),
    "builtin": len,
    "builtin 2": max,
}
'''
SHOW = """
import json, sys
from whet.given.object_digests import object_digest
if sys.argv[1] == "import":
    sys.path.insert(0, sys.argv[2])
    import digested as module
    objects = module.objects
else:
    names = {"__name__": "__main__"}
    exec(compile(open(sys.argv[2] + "/digested.py").read(), "<nowhere>", "exec"), names)
    objects = names["objects"]
print(json.dumps({name: object_digest(value) for name, value in objects.items()}))
"""


def digests(directory, how, *, seed):
    command = [sys.executable, "-c", SHOW, how, str(directory)]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    completed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(completed.stdout)


@pytest.mark.parametrize("how", ["import", "exec"])
def test_digests_are_the_same_in_every_process(tmp_path, how):
    (tmp_path / "digested.py").write_text(MODULE)
    first = digests(tmp_path, how, seed="1")
    assert digests(tmp_path, how, seed="2") == first
    assert all(len(digest) == 64 for digest in first.values())
    different = {name: digest for name, digest in first.items() if name != "closure 2"}
    assert len(set(different.values())) == len(different)
    assert first["closure"] == first["closure 2"], "variables of an enclosing function are not covered"


@pytest.mark.parametrize("how", ["import", "exec"])
def test_different_code_has_a_different_digest(tmp_path, how):
    (tmp_path / "digested.py").write_text(MODULE)
    before = digests(tmp_path, how, seed="1")
    changed = MODULE.replace("return 1.0 if", "return 2.0 if").replace("self.scale * len", "self.scale + len")
    (tmp_path / "digested.py").write_text(changed.replace('{"a", "b", "c"}', '{"a", "b", "z"}'))
    after = digests(tmp_path, how, seed="1")
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {
        *("plain", "partial", "partial 2", "instance", "instance 2", "class", "method", "lambda"),
    }


def test_digest_does_not_depend_on_location():
    def short(completion):
        return -len(completion)

    digest = object_digest(short)

    def enclosing():
        def short(completion):
            return -len(completion)

        return short

    assert object_digest(enclosing()) == digest
    first = lambda completion: -len(completion)  # noqa: E731
    assert object_digest(first) == object_digest({"x": lambda completion: -len(completion)}["x"])
    assert object_digest(functools.partial(short)) != digest
