"""Advice about a config."""

from transformers import AutoModelForCausalLM

from tiny import run_config
from whet.config.load_config import validate_config
from whet.studies.advise import advise


def test_size_of_a_tiny_model_is_not_rounded_to_zero(tiny_directory, tmp_path):
    findings = advise(validate_config(run_config(tiny_directory, tmp_path)))
    [message] = [finding.message for finding in findings if finding.key == "optim.lr"]
    model = AutoModelForCausalLM.from_pretrained(tiny_directory)
    assert f"a model with {sum(p.numel() for p in model.parameters()):,} parameters" in message
