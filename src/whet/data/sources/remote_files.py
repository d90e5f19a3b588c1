"""Read data files by address: object storage and web servers, through fsspec.

Addresses appear in logs, errors and the config of a run, so they must not contain credentials. fsspec finds
those in the environment or in its own settings.
"""

import io
import json
import logging
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from whet.data.sources.compressed_files import open_compressed, split_file_name
from whet.data.sources.readers import SourceContent, digest_text, files_content
from whet.errors import DataError

log = logging.getLogger("whet")

# scheme -> the package that reads it besides fsspec
SCHEMES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "http": "aiohttp",
    "https": "aiohttp",
    "memory": "",
    "file": "",
}
_SECRET = re.compile(r"sig|token|secret|password|credential|access|key|auth", re.IGNORECASE)
_FACTS = ("ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "Last-Modified", "LastModified")
_DATES = ("last_modified", "mtime", "updated", "created")  # used if there is none of the above
_BUFFER_BYTES = 2**20
_ATTEMPTS = 4  # to read from a connection that fails
_PAUSE_S = 0.5  # before the first of the further attempts; doubles each time


def remote_content(address: str) -> SourceContent:
    """Return the records of a remote file, or of all files that match a pattern.

    The identity of a remote file is its size with its ETag, checksum or date, which need no download.

    Raises:
        DataError: The address has credentials, its package is not installed, or no file matches.
    """
    scheme = check_address(address)
    if scheme == "file":
        raise AssertionError("file addresses are local paths")
    files = _find_files(address, scheme)
    paths = [cast(Path, file) for file in files]  # readers only use what a RemoteFile has
    content = files_content(paths)

    def identity() -> str:
        suffixes = " ".join(split_file_name(path)[1] for path in paths)
        return digest_text(f"{suffixes} {json.dumps([file.facts() for file in files])}")

    return SourceContent(
        rows=content.rows,
        digest=identity,
        rename=content.rename,
        shards=content.shards,
        identity=identity,
    )


def check_address(address: str) -> str:
    """Return the scheme of an address; raise an error, without the address, if it contains credentials."""
    parts = urlsplit(address)
    scheme = parts.scheme.lower()
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise DataError(f"{scheme}:// is not a source that whet can read", hint=f"supported: {known}")
    is_web = scheme in ("http", "https")
    has_user = "@" in parts.netloc and (is_web or ":" in parts.netloc.rpartition("@")[0])
    query = parse_qsl(parts.query, keep_blank_values=True) if is_web else []
    if has_user or any(_SECRET.search(name) for name, _ in query):
        host = parts.netloc.rpartition("@")[2]
        raise DataError(
            f"the address {scheme}://{host}/... contains credentials, which would appear in logs and configs",
            hint="remove them, and give them to fsspec: in environment variables such as "
            "AWS_ACCESS_KEY_ID, or in a file of ~/.config/fsspec",
        )
    return scheme


def local_path(address: str) -> str:
    """Return the path of a file:// address."""
    return unquote(urlsplit(address).path)


class RemoteFile:
    """A remote file, with the part of the interface of a Path that readers use."""

    def __init__(self, system: Any, address: str) -> None:  # Any: a file system of fsspec
        self._system = system
        self._address = address
        path = urlsplit(address).path if "://" in address else address
        pure = PurePosixPath(unquote(path))
        self.name, self.stem, self.suffix, self.suffixes = pure.name, pure.stem, pure.suffix, pure.suffixes

    def __str__(self) -> str:
        return self._address

    def open(self) -> BinaryIO:
        """Open the file for reading, decompressed according to its suffix."""
        file = io.BufferedReader(_RemoteStream(self._system, self._address), _BUFFER_BYTES)
        return open_compressed(file, self.suffix, str(self)) or file

    def facts(self) -> dict[str, str]:
        """Return the size of the file, and its checksum or date."""
        try:
            info: dict[str, Any] = self._system.info(self._address)  # Any: depends on the file system
        except Exception as error:  # file systems raise whatever their libraries raise
            raise _remote_error(self._address, error) from None
        facts = {name: str(info[name]) for name in _FACTS if info.get(name)}
        facts = facts or {name: str(info[name]) for name in _DATES if info.get(name)}
        return {"size": str(info.get("size")), **facts}


class _RemoteStream(io.RawIOBase):
    """The bytes of a remote file. A connection that fails is opened again at the same position."""

    def __init__(self, system: Any, address: str) -> None:  # Any: a file system of fsspec
        self._system = system
        self._address = address
        self._position = 0
        self._has_ranges = True  # whether parts of the file can be requested
        self._file = self._open()

    def _open(self) -> Any:  # Any: a file of fsspec
        options = {} if self._has_ranges else {"block_size": 0}
        try:
            file = self._system.open(self._address, "rb", **options)
            if self._position and self.seekable_file(file):
                file.seek(self._position)
            elif self._position:
                _skip(file, self._position)
        except Exception as error:  # file systems raise whatever their libraries raise
            raise _remote_error(self._address, error) from None
        return file

    @staticmethod
    def seekable_file(file: Any) -> bool:  # Any: a file of fsspec
        """Return whether a file of fsspec can seek; a streamed one has no size."""
        return bool(file.seekable()) and getattr(file, "size", None) is not None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self.seekable_file(self._file)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = int(self._file.seek(offset, whence))
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:  # Any: a writable buffer
        view = memoryview(buffer).cast("B")
        for attempt in range(_ATTEMPTS):
            try:
                data = self._file.read(len(view))
            except Exception as error:  # file systems raise whatever their libraries raise
                if attempt == _ATTEMPTS - 1:
                    raise _remote_error(self._address, error) from None
                if isinstance(error, ValueError):  # fsspec: a web server without range requests
                    self._has_ranges = False
                else:
                    log.warning("%s: %s; reading again", self._address, _reason(error))
                    time.sleep(_PAUSE_S * 2**attempt)
                self._file = self._open()
            else:
                view[: len(data)] = data
                self._position += len(data)
                return len(data)
        raise AssertionError("unreachable")

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _skip(file: Any, count: int) -> None:  # Any: a file of fsspec
    while count and (data := file.read(min(count, _BUFFER_BYTES))):
        count -= len(data)


def _find_files(address: str, scheme: str) -> Sequence[RemoteFile]:
    system = _file_system(address, scheme)
    magic = "*" if scheme in ("http", "https") else "*?["
    if not any(character in address for character in magic):
        return [RemoteFile(system, address)]
    try:
        matches = sorted(system.glob(address))
    except Exception as error:  # file systems raise whatever their libraries raise
        raise _remote_error(address, error) from None
    if not matches:
        raise DataError(f"no file matches {address}", hint="** matches subdirectories")
    return [RemoteFile(system, system.unstrip_protocol(match)) for match in matches]


def _file_system(address: str, scheme: str) -> Any:  # Any: a file system of fsspec
    if scheme != "memory" and os.environ.get("WHET_OFFLINE", "0") not in ("", "0"):
        raise DataError(f"{address} is not on this machine, and WHET_OFFLINE is set", hint="unset it")
    try:
        import fsspec

        return fsspec.core.url_to_fs(address)[0]
    except ImportError as error:
        name = SCHEMES[scheme] or error.name
        raise DataError(f"{address} needs {name}", hint='pip install "whet[remote]"') from error
    except Exception as error:  # file systems raise whatever their libraries raise
        raise _remote_error(address, error) from None


def _remote_error(address: str, error: Exception) -> DataError:
    if isinstance(error, DataError):
        return error
    cause = error.__cause__
    if address.startswith("http") and isinstance(cause, Exception) and not _is_missing(cause):
        error = cause  # fsspec reports every failure of a web server as a missing file
    if isinstance(error, FileNotFoundError):
        return DataError(f"{address} does not exist", hint="check the address and your access rights")
    return DataError(
        f"{address} cannot be read: {_reason(error)}",
        hint="check the connection and the credentials in the environment",
    )


def _is_missing(cause: Exception) -> bool:
    return isinstance(cause, FileNotFoundError) or getattr(cause, "status", None) in (404, 410)


def _reason(error: Exception) -> str:
    """Return the kind and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
