"""GGUF adapters: the tensors that the gguf package reads give the update of the adapter."""

import gguf
import numpy as np
import pytest
import torch

import whet
from model_io.test_gguf_families import ROWS, make_reference, reorder_rows
from whet.errors import ModelError
from whet.model_io.gguf.adapter_writer import base_parameters, write_gguf_adapter
from whet.model_io.gguf.reader import convert_gguf


def adapted(tmp_path, row, **settings):
    """Return a random model with a random adapter."""
    family, differences, _ = ROWS[row]
    make_reference(tmp_path / "source", family, differences, num_hidden_layers=1)
    model, _ = whet.load(tmp_path / "source", dtype=torch.float32, device="cpu")
    whet.attach_lora(model, **{"rank": 4, "alpha": 12, **settings})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    return model


@pytest.mark.parametrize("variant", ["lora", "rslora"])
@pytest.mark.parametrize("row", ["llama", "qwen3", "gpt2"])
def test_update_equals_the_change_of_the_merged_weights(tmp_path, row, variant):
    model = adapted(tmp_path, row, variant=variant)
    write_gguf_adapter(tmp_path / "adapter.gguf", model)
    reader = gguf.GGUFReader(tmp_path / "adapter.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.type"] == "adapter"
    assert fields["general.architecture"] == ROWS[row][2]
    assert fields["adapter.type"] == "lora"
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    before = {name: tensor.clone() for name, tensor in base_parameters(model).items()}
    after = whet.merge(model).state_dict()
    names = {"llama": "attn_q", "qwen3": "attn_q", "gpt2": "attn_qkv"}
    parameter = f"layers.0.self_attn.{'qkv' if row == 'gpt2' else 'q'}_proj.weight"
    expected = (after[parameter] - before[parameter]).numpy()
    if row == "llama":
        expected = reorder_rows(expected, 4)
    a, b = (tensors[f"blk.0.{names[row]}.weight.lora_{part}"] for part in "ab")
    assert a.shape == (4, 64)
    np.testing.assert_allclose(fields["adapter.lora.alpha"] / 4 * b @ a, expected, atol=1e-5)


def test_layers_of_other_rank_and_scale_share_one_alpha(tmp_path):
    model = adapted(tmp_path, "qwen3", rank_pattern={"v_proj": 2}, alpha_pattern={"v_proj": 5})
    write_gguf_adapter(tmp_path / "adapter.gguf", model)
    reader = gguf.GGUFReader(tmp_path / "adapter.gguf")
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    alpha = reader.fields["adapter.lora.alpha"].contents()
    before = base_parameters(model)["layers.0.self_attn.v_proj.weight"].clone()
    expected = whet.merge(model).state_dict()["layers.0.self_attn.v_proj.weight"] - before
    a, b = (tensors[f"blk.0.attn_v.weight.lora_{part}"] for part in "ab")
    assert a.shape[0] == 2
    np.testing.assert_allclose(alpha / 2 * b @ a, expected.numpy(), atol=1e-5)


def test_unrepresentable_adapters_are_rejected(tmp_path):
    with pytest.raises(ModelError, match="GGUF adapters do not support DoRA") as caught:
        write_gguf_adapter(tmp_path / "a.gguf", adapted(tmp_path, "qwen3", variant="dora"))
    assert "--to gguf" in caught.value.hint
    model, _ = whet.load(tmp_path / "source", dtype=torch.float32, device="cpu")
    with pytest.raises(ModelError, match="the model has no adapter to export"):
        write_gguf_adapter(tmp_path / "a.gguf", model)
    assert not (tmp_path / "a.gguf").exists()


def test_adapter_is_not_a_model(tmp_path):
    write_gguf_adapter(tmp_path / "a.gguf", adapted(tmp_path, "llama"))
    with pytest.raises(ModelError, match="a.gguf is a GGUF adapter, not a model"):
        convert_gguf(tmp_path / "a.gguf", tmp_path / "model")
