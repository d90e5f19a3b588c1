"""Importance matrices of llama.cpp, in both of its formats."""

import struct

import gguf
import numpy as np
import pytest

from whet.errors import ModelError
from whet.model_io.gguf.imatrix import read_imatrix


def write_binary_imatrix(path, means, calls=3):
    content = struct.pack("<i", len(means))
    for name, values in means.items():
        content += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, len(values))
        content += (np.asarray(values) * max(calls, 1)).astype(np.float32).tobytes()
    path.write_bytes(content + struct.pack("<ii", calls, 4) + b"text")


def write_gguf_imatrix(path, sums, counts):
    writer = gguf.GGUFWriter(path, "imatrix")
    for name in sums:
        writer.add_tensor(f"{name}.in_sum2", sums[name].astype(np.float32))
        writer.add_tensor(f"{name}.counts", counts[name].astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_binary_format(tmp_path):
    means = {"blk.0.ffn_up.weight": np.arange(8.0), "blk.0.attn_q.weight": np.ones(4)}
    write_binary_imatrix(tmp_path / "i.dat", means)
    importance = read_imatrix(tmp_path / "i.dat")
    assert importance.keys() == means.keys()
    for name, values in means.items():
        np.testing.assert_allclose(importance[name], values)


def test_gguf_format_with_experts(tmp_path):
    sums = {"blk.0.ffn_up_exps.weight": np.arange(12.0).reshape(3, 4), "blk.0.attn_q.weight": np.ones((1, 4))}
    counts = {
        "blk.0.ffn_up_exps.weight": np.array([[2.0], [0.0], [4.0]]),
        "blk.0.attn_q.weight": np.array([[5.0]]),
    }
    write_gguf_imatrix(tmp_path / "i.gguf", sums, counts)
    importance = read_imatrix(tmp_path / "i.gguf")
    experts = importance["blk.0.ffn_up_exps.weight"].reshape(3, 4)
    np.testing.assert_allclose(experts[0], [0, 0.5, 1, 1.5])
    np.testing.assert_allclose(experts[1], 1)  # an expert that no token reached
    np.testing.assert_allclose(experts[2], [2, 2.25, 2.5, 2.75])
    np.testing.assert_allclose(importance["blk.0.attn_q.weight"], 0.2)


def test_invalid_files_are_rejected(tmp_path):
    path = tmp_path / "i.dat"
    with pytest.raises(ModelError, match="i.dat cannot be read: No such file"):
        read_imatrix(path)
    for content, message in (
        (b"hello, world", "is not an importance matrix of llama.cpp: the file ends within an entry"),
        (b"", "is not an importance matrix of llama.cpp"),
        (struct.pack("<i", 0), "it has no entries"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "it has no entries"),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=message):
            read_imatrix(path)
    write_binary_imatrix(path, {"a": [1.0, float("nan")]})
    with pytest.raises(ModelError, match="the importance of a has negative or non-finite values"):
        read_imatrix(path)
