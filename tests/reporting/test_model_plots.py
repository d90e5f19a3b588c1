"""Plots of attention maps and layers, and their errors."""

import pytest
import torch

from whet.errors import ConfigError
from whet.reporting.model_plots import draw_attention, draw_layers
from whet.training.observe.attention_maps import attention_maps

pytest.importorskip("matplotlib")
PNG = b"\x89PNG"


def test_draw_attention(tiny, tmp_path):
    maps = attention_maps(tiny[0], torch.tensor([[5, 6, 7]]))
    assert draw_attention(maps, tmp_path / "a.png", layer=1).read_bytes()[:4] == PNG
    text = draw_attention(maps, tmp_path / "a.svg", layer=1, labels=["<a>", "$b$", "c"]).read_text()
    assert all(f"layer 1, head {head}" in text for head in range(4))
    assert "&lt;a&gt;" in text
    with pytest.raises(ConfigError, match="layer 7 has no attention map") as caught:
        draw_attention(maps, tmp_path / "b.png", layer=7)
    assert "0, 1" in caught.value.hint
    with pytest.raises(ConfigError, match="ends in .png"):
        draw_attention(maps, tmp_path / "a.nothing", layer=1)


def test_draw_layers(tmp_path):
    text = draw_layers({"layers.0": 1.0, "layers.1": 2.5}, tmp_path / "a.svg", title="sizes").read_text()
    assert "sizes" in text
    assert "layers.1" in text
    with pytest.raises(ConfigError, match="no layers to draw"):
        draw_layers({}, tmp_path / "b.svg", title="none")
