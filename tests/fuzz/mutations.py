"""Mutations of valid files: of values in their structure, of bytes, of lengths, of nesting."""

import copy
import json
import math
import re
import struct

NUMBERS = [
    0,
    -1,
    1,
    2,
    7,
    2**31,
    2**63,
    -(2**63),
    2**64,
    10**30,
    0.5,
    -0.0,
    1e-45,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
]
TEXTS = ["", " ", "x", "a" * 2000, "²", "٣", "\0", "\x1b[31m", "é\u0301", "\u2028", "../../etc", "/", "~nobody/x", "{{ x }}",
         "null", "-1", "1e400", "\U0001d518", "\ufeff", "(", "[", "(a+)+$", "%s%n", "float32", "<|end|>"]  # fmt: skip
LONE_SURROGATE = "\ud800"


def random_value(rng, *, surrogates=False):
    """Return a random unexpected value."""
    kind = rng.randrange(8)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind < 4:
        return rng.choice([*TEXTS, LONE_SURROGATE] if surrogates else TEXTS)
    if kind == 4:
        return rng.choice([None, True, False])
    if kind == 5:
        return rng.choice([[], {}, [[]], {"": None}, [None], [1, "a", {}], {"a": {"b": [1]}}])
    if kind == 6:
        return nested(rng.choice([3, 60, 400]), rng)
    return [rng.choice(NUMBERS) for _ in range(rng.choice([1, 3, 300]))]


def nested(levels, rng):
    value = rng.choice([1, "x", None])
    for _ in range(levels):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def paths(value, prefix=()):
    """Yield the path of every value in a JSON value, starting with the root."""
    yield prefix
    if isinstance(value, dict):
        for key in value:
            yield from paths(value[key], (*prefix, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 50)):
            yield from paths(value[index], (*prefix, index))


def at(value, path):
    for key in path:
        value = value[key]
    return value


def mutate_json(value, rng, *, times=None, surrogates=False):
    """Return a JSON value with a few random changes, and a description of them."""
    value = copy.deepcopy(value)
    changes = []
    for _ in range(times or rng.choice([1, 1, 1, 2, 3])):
        all_paths = list(paths(value))
        path = rng.choice(all_paths[1:] or all_paths) if rng.random() < 0.97 else ()
        if not path:
            value = random_value(rng, surrogates=surrogates)
            changes.append(f"all = {short(value)}")
            continue
        parent, key = at(value, path[:-1]), path[-1]
        match rng.randrange(6):
            case 0 if isinstance(parent, dict):
                del parent[key]
                changes.append(f"without {path}")
            case 1 if isinstance(parent, dict):
                parent[rng.choice(TEXTS)] = parent.pop(key)
                changes.append(f"{path} renamed")
            case 2:
                parent[key] = copy.deepcopy(at(value, rng.choice(all_paths)))
                changes.append(f"{path} = another part")
            case 3 if isinstance(parent, list):
                parent[key : key + 1] = [parent[key]] * rng.choice([0, 2, 5])
                changes.append(f"{path} repeated or removed")
            case _:
                parent[key] = random_value(rng, surrogates=surrogates)
                changes.append(f"{path} = {short(parent[key])}")
    return value, "; ".join(changes)


def short(value):
    return ascii(value)[:60]


def edit_json(path, rng):
    value, description = mutate_json(json.loads(path.read_text()), rng)
    path.write_text(json.dumps(value))
    return f"{path.name}: {description}"


def mutate_bytes(data, rng):
    """Return bytes with some of them flipped, truncated, repeated or replaced, and a description."""
    data = bytearray(data)
    changes = []
    for _ in range(rng.choice([1, 1, 2, 4])):
        if not data:
            return b"", "empty"
        offset = rng.choice([rng.randrange(len(data)), rng.randrange(min(len(data), 64)), len(data) - 1])
        match rng.randrange(7):
            case 0:
                data[offset] ^= 1 << rng.randrange(8)
                changes.append(f"bit at {offset}")
            case 1:
                del data[offset:]
                changes.append(f"truncated at {offset}")
            case 2:
                del data[offset : offset + rng.choice([1, 4, 100])]
                changes.append(f"hole at {offset}")
            case 3:
                data[offset:offset] = data[offset : offset + rng.choice([1, 8, 200])]
                changes.append(f"repeated at {offset}")
            case 4:
                width, number = rng.choice([(4, "<I"), (8, "<Q")]), rng.choice([0, 1, 2**31 - 1, 2**32 - 1])
                data[offset : offset + width[0]] = struct.pack(width[1], number)
                changes.append(f"{number} at {offset}")
            case 5:
                data[offset:offset] = rng.randbytes(rng.choice([1, 3, 16]))
                changes.append(f"noise at {offset}")
            case _:
                size = rng.choice([1, 8, 64])
                data[offset : offset + size] = bytes([rng.choice([0, 255, 10, 34, 44])]) * size
                changes.append(f"{size} equal bytes at {offset}")
    return bytes(data), "; ".join(changes)


def mutate_file(path, rng):
    data, description = mutate_bytes(path.read_bytes(), rng)
    path.write_bytes(data)
    return f"{path.name}: {description}"


def mutate_text(text, rng, pieces):
    """Return a text with pieces inserted, repeated, removed or replaced, and a description."""
    parts = [part for part in re.split(r"(\W)", text) if part]
    changes = []
    for _ in range(rng.choice([1, 2, 2, 5])):
        offset = rng.randrange(len(parts) + 1)
        match rng.randrange(4):
            case 0:
                parts[offset:offset] = [rng.choice(pieces)]
            case 1:
                del parts[offset : offset + rng.choice([1, 2, 6])]
            case 2:
                parts[offset:offset] = parts[offset : offset + rng.choice([1, 5])]
            case _:
                parts[offset : offset + 1] = [rng.choice(pieces)]
        changes.append(f"piece {offset}")
    return "".join(parts), "; ".join(changes)
