"""The DPO family: reference log-probabilities, computed once and stored, or an online reference."""

import hashlib
import logging

import numpy as np

from whet.config.objectives.preference import PreferenceObjective
from whet.data.batches import one_pass
from whet.data.run_data import Needs
from whet.data.tokens.examples import StoredPairs
from whet.models.language_model import LanguageModel, evaluating
from whet.objectives.objective import Objective
from whet.objectives.preference import Preference, answer_logprobs
from whet.recipes.objective_inputs import ObjectiveInputs
from whet.recipes.reference_model import Reference, identity_of, load_reference, untrained_reference
from whet.training.loss import in_precision

log = logging.getLogger("whet")


def needs(section: PreferenceObjective) -> Needs:
    """Return what is read from records: pairs of answers."""
    return Needs(pairs=True)


def build_objective(section: PreferenceObjective, inputs: ObjectiveInputs) -> Objective:
    """Return the objective; reference log-probabilities of every pair are computed or found first."""
    named = _named_reference(section, inputs) if section.has_reference else None
    reference: Reference | None = None
    if section.has_reference and section.reference == "online":
        reference = named or untrained_reference(inputs.model)
    elif section.has_reference:
        model, identity = inputs.model, f"{inputs.base_digest} {inputs.model.fingerprint}"
        if named is not None:
            model, identity = named, inputs.identities[str(section.reference_model)]
        for name, pairs in inputs.examples.items():
            assert isinstance(pairs, StoredPairs)
            pairs.references = _references(name, pairs, model, identity, inputs)
    return Preference(
        section.kind,
        beta=section.strength,
        gamma=section.gamma,
        label_smoothing=section.label_smoothing,
        logprobs=section.logprobs,
        reference=reference,
    )


def _named_reference(section: PreferenceObjective, inputs: ObjectiveInputs) -> LanguageModel | None:
    if (name := section.reference_model) is None:
        return None
    longest = max(int(pairs.sides.lengths.max()) for pairs in inputs.examples.values())
    reference = load_reference(
        name, inputs.model, inputs.tokenizer, precision=inputs.precision, longest=longest
    )
    inputs.identities[name] = identity_of(reference)
    return reference


def _references(
    name: str, pairs: StoredPairs, model: LanguageModel, identity: str, inputs: ObjectiveInputs
) -> np.ndarray:
    """What the reference makes of each answer: computed once, kept beside the tokens."""
    sides = pairs.sides
    key = hashlib.sha256(f"{identity} {inputs.precision.compute}".encode())
    key.update(np.stack((sides.starts, sides.stops)).tobytes())
    path = pairs.store.directory / f"reference-{key.hexdigest()[:32]}.bin"
    if inputs.world.from_main(path.is_file() and path.stat().st_size == 8 * len(sides)):
        log.info("reference: log-probabilities of %s from the store", name)
        return np.fromfile(path, dtype=np.float64).reshape(-1, 2)
    log.info("reference: %d answers of %s, once before training", len(sides), name)
    found = np.zeros((len(pairs), 2))
    device = model.device
    batches = list(one_pass(pairs, inputs.steps))
    mine = []
    with evaluating(model):
        for _, (_, batch), _ in inputs.world.rounds(batches):
            with in_precision(inputs.precision, device):
                scores = answer_logprobs(model, batch.to(device))
            mine.append(scores.double().cpu().numpy().reshape(-1, 2))
    for (places, _), answers in zip(batches, inputs.world.in_order(mine, len(batches)), strict=True):
        found[places] = answers
    if inputs.world.is_main:
        pairs.store.keep_beside(path.name, found)
    return found
