"""Simulate power loss: record how a process changes a directory, and write what may remain of it.

The model is a file system that guarantees fsync only. A file keeps the bytes that it had at its last sync; any later
bytes may be lost, torn or zero. A directory keeps the names that it had at its last sync; each later creation, rename
and removal may or may not survive, independently of the others. Renames are atomic.
"""

import contextlib
import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path

HOOKED = ("fsync", "fdatasync", "rename", "replace", "unlink", "remove", "rmdir", "mkdir")
ROOT = 0


@dataclass(frozen=True)
class Link:
    directory: int
    name: str
    node: int


@dataclass(frozen=True)
class Move:
    source: Link
    target: Link


@dataclass(frozen=True)
class Unlink:
    link: Link


@dataclass(frozen=True)
class Data:
    node: int
    content: bytes


@dataclass(frozen=True)
class Sync:
    node: int


class Disk:
    """Records every change of a directory, in order, while a run works in it."""

    def __init__(self, root):
        self.root = Path(root)
        self.operations = []
        self._lock = threading.RLock()
        self._nodes = {}  # current inodes -> unique number of the node
        self._names = {}  # current entries: (directory, name) -> node
        self._seen = {}  # file -> size and modification time when it was last read
        self._directories = {ROOT}
        self._count = ROOT
        self._observe()
        self.start_index = len(self.operations)  # everything before is on the disk

    @contextlib.contextmanager
    def recording(self, monkeypatch):
        import whet.storage

        with monkeypatch.context() as patch:
            for name in HOOKED:
                patch.setattr(os, name, self._hook(name, getattr(os, name)))
            patch.setattr(whet.storage, "before_file_operation", lambda operation, path: self._observe())
            yield
        self._observe()

    def _hook(self, name, original):
        def hooked(*arguments, **keywords):
            with self._lock:
                self._observe()
                result = original(*arguments, **keywords)
                self._observe()
                if name in ("fsync", "fdatasync"):
                    node = self._nodes.get(os.fstat(arguments[0]).st_ino)
                    if node is not None:
                        self.operations.append(Sync(node))
            return result

        return hooked

    def _observe(self):
        """Compare the directory with its last state, and record the changes."""
        with self._lock:
            nodes, names, files = {self.root.stat().st_ino: ROOT}, {}, {}
            self._scan(self.root, ROOT, nodes, names, files)
            self._nodes, before, self._names = nodes, self._names, names
            gone = {node: entry for entry, node in before.items() if names.get(entry) != node}
            new = {node: entry for entry, node in names.items() if before.get(entry) != node}
            made = [Link(*new[node], node) for node in new if node not in gone]
            self.operations += sorted(made, key=lambda link: link.node)
            moved = [node for node in new if node in gone]
            self.operations += [Move(Link(*gone[n], n), Link(*new[n], n)) for n in moved]
            replaced = {new[node] for node in new}
            self.operations += [
                Unlink(Link(*entry, node))
                for node, entry in gone.items()
                if node not in new and entry not in replaced
            ]
            for node, (path, key) in files.items():
                if self._seen.get(node) != key:
                    with contextlib.suppress(FileNotFoundError):
                        self.operations.append(Data(node, path.read_bytes()))
                        self._seen[node] = key

    def _scan(self, directory, parent, nodes, names, files):
        try:
            entries = list(os.scandir(directory))
        except FileNotFoundError:  # another thread removed it
            return
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            node = self._nodes.get(status.st_ino)
            if node is None:
                self._count += 1
                node = self._count
            nodes[status.st_ino] = node
            names[parent, entry.name] = node
            if stat.S_ISDIR(status.st_mode):
                self._directories.add(node)
                self._scan(entry.path, node, nodes, names, files)
            else:
                files[node] = Path(entry.path), (status.st_size, status.st_mtime_ns)

    def write_state_after_cut(self, at, rng, target):
        """Write to `target` a state that the disk may have if the power fails after `at` operations."""
        done = self.operations[:at]
        synced = {}  # node -> index of its last sync
        for index, operation in enumerate(done):
            if isinstance(operation, Sync):
                synced[operation.node] = index
        chance = rng.choice((0.0, 0.3, 0.7, 1.0))
        names, contents = {}, {}
        for index, operation in enumerate(done):
            links = _affected_links(operation)
            on_disk = index < self.start_index or all(
                synced.get(link.directory, -1) > index for link in links
            )
            if isinstance(operation, Data):
                versions = contents.setdefault(operation.node, [b"", b""])  # on the disk, and newest
                versions[1] = operation.content
                if index < max(synced.get(operation.node, -1), self.start_index):
                    versions[0] = operation.content
            elif links and (on_disk or rng.random() < chance):
                _apply(operation, names)
        self._write(Path(target), ROOT, names, contents, rng)

    def _write(self, path, node, names, contents, rng):
        path.mkdir(parents=True, exist_ok=True)
        for (directory, name), child in names.items():
            if directory != node:
                continue
            if child in self._directories:
                self._write(path / name, child, names, contents, rng)
            else:
                (path / name).write_bytes(_torn_content(*contents.get(child, (b"", b"")), rng))


def _affected_links(operation):
    match operation:
        case Link():
            return [operation]
        case Move(source, target):
            return [source, target]
        case Unlink(link):
            return [link]
    return []


def _apply(operation, names):
    match operation:
        case Link(directory, name, node):
            names[directory, name] = node
        case Move(source, target):
            # the creation of the source may have been lost
            if names.get((source.directory, source.name)) == source.node:
                del names[source.directory, source.name]
                names[target.directory, target.name] = target.node
        case Unlink(link):
            if names.get((link.directory, link.name)) == link.node:
                del names[link.directory, link.name]


def _torn_content(on_disk, newest, rng):
    """Return what may remain of a file whose last bytes were not synced."""
    if on_disk == newest:
        return newest
    prefix = on_disk if newest.startswith(on_disk) else b""  # a rewritten file may be empty
    rest = newest[len(prefix) :]
    length = rng.randrange(len(rest) + 1)
    return rng.choice(
        (on_disk, newest, prefix + rest[:length], prefix + rest[:length] + bytes(len(rest) - length))
    )
