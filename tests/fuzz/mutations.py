"""Changes to files that are valid: to a value somewhere in their structure, to bytes, to lengths, to nesting."""

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


def strange(rng, *, surrogates=False):
    """A value that is not what anybody expects."""
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
    """Where every value of a JSON value is, the whole one first."""
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


def changed(value, rng, *, times=None, surrogates=False):
    """A JSON value with a few strange things in it; what was done, too."""
    value = copy.deepcopy(value)
    said = []
    for _ in range(times or rng.choice([1, 1, 1, 2, 3])):
        places = list(paths(value))
        path = rng.choice(places[1:] or places) if rng.random() < 0.97 else ()
        if not path:
            value = strange(rng, surrogates=surrogates)
            said.append(f"all = {short(value)}")
            continue
        parent, key = at(value, path[:-1]), path[-1]
        match rng.randrange(6):
            case 0 if isinstance(parent, dict):
                del parent[key]
                said.append(f"without {path}")
            case 1 if isinstance(parent, dict):
                parent[rng.choice(TEXTS)] = parent.pop(key)
                said.append(f"{path} renamed")
            case 2:
                parent[key] = copy.deepcopy(at(value, rng.choice(places)))
                said.append(f"{path} = another part")
            case 3 if isinstance(parent, list):
                parent[key : key + 1] = [parent[key]] * rng.choice([0, 2, 5])
                said.append(f"{path} repeated or removed")
            case _:
                parent[key] = strange(rng, surrogates=surrogates)
                said.append(f"{path} = {short(parent[key])}")
    return value, "; ".join(said)


def short(value):
    return ascii(value)[:60]


def edit_json(path, rng):
    value, said = changed(json.loads(path.read_text()), rng)
    path.write_text(json.dumps(value))
    return f"{path.name}: {said}"


def damage(data, rng):
    """Bytes with some of them flipped, cut, doubled or replaced by an extreme number."""
    data = bytearray(data)
    said = []
    for _ in range(rng.choice([1, 1, 2, 4])):
        if not data:
            return b"", "empty"
        place = rng.choice([rng.randrange(len(data)), rng.randrange(min(len(data), 64)), len(data) - 1])
        match rng.randrange(7):
            case 0:
                data[place] ^= 1 << rng.randrange(8)
                said.append(f"bit at {place}")
            case 1:
                del data[place:]
                said.append(f"cut at {place}")
            case 2:
                del data[place : place + rng.choice([1, 4, 100])]
                said.append(f"hole at {place}")
            case 3:
                data[place:place] = data[place : place + rng.choice([1, 8, 200])]
                said.append(f"doubled at {place}")
            case 4:
                width, number = rng.choice([(4, "<I"), (8, "<Q")]), rng.choice([0, 1, 2**31 - 1, 2**32 - 1])
                data[place : place + width[0]] = struct.pack(width[1], number)
                said.append(f"{number} at {place}")
            case 5:
                data[place:place] = rng.randbytes(rng.choice([1, 3, 16]))
                said.append(f"noise at {place}")
            case _:
                size = rng.choice([1, 8, 64])
                data[place : place + size] = bytes([rng.choice([0, 255, 10, 34, 44])]) * size
                said.append(f"{size} equal bytes at {place}")
    return bytes(data), "; ".join(said)


def damage_file(path, rng):
    data, said = damage(path.read_bytes(), rng)
    path.write_bytes(data)
    return f"{path.name}: {said}"


def shuffled_text(text, rng, pieces):
    """A text with pieces of its language inserted, repeated, cut out or swapped."""
    parts = [part for part in re.split(r"(\W)", text) if part]
    said = []
    for _ in range(rng.choice([1, 2, 2, 5])):
        place = rng.randrange(len(parts) + 1)
        match rng.randrange(4):
            case 0:
                parts[place:place] = [rng.choice(pieces)]
            case 1:
                del parts[place : place + rng.choice([1, 2, 6])]
            case 2:
                parts[place:place] = parts[place : place + rng.choice([1, 5])]
            case _:
                parts[place : place + 1] = [rng.choice(pieces)]
        said.append(f"piece {place}")
    return "".join(parts), "; ".join(said)
