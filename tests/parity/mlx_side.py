"""The mlx-lm side of the round trips, run in a separate process: `mlx_side.py use|make MODEL ADAPTER OUT [JSON]`."""

import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load, save_config


def make(model, directory, settings):
    """Write an adapter as mlx_lm.lora does, with every weight changed from its initial value."""
    model.freeze()
    linear_to_lora_layers(
        model, settings["num_layers"], settings["lora_parameters"], settings["fine_tune_type"] == "dora"
    )
    mx.random.seed(0)
    tensors = {
        name: value + 0.1 * mx.random.normal(value.shape)
        for name, value in tree_flatten(model.trainable_parameters())
        if name.rsplit(".", 1)[-1] in ("lora_a", "lora_b", "m")
    }
    Path(directory).mkdir(parents=True)
    mx.save_safetensors(f"{directory}/adapters.safetensors", tensors)
    save_config(settings, Path(directory) / "adapter_config.json")


def main(action, model_path, adapter, out, settings="{}"):
    if action == "make":
        make(load(model_path)[0], adapter, json.loads(settings))
    model, _ = load(model_path, adapter_path=adapter)
    given = [5, 77, 130, 9, 201, 64]
    logits = model(mx.array([given])).astype(mx.float32)
    greedy = generate_step(mx.array(given), model, max_tokens=24)
    result = {"logits": logits.tolist(), "tokens": [int(token) for token, _ in greedy]}
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
