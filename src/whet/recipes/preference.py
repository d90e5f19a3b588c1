"""DPO, IPO, ORPO and SimPO, with precomputed or online log-probabilities of a reference model."""

import hashlib
import logging
from collections.abc import Mapping

import numpy as np

from whet.config.objectives.preference import PreferenceObjective
from whet.data.batches import iter_batches_once
from whet.data.run_data import Needs
from whet.data.tokens.examples import StoredPairs
from whet.data.tokens.token_store import TokenStore
from whet.models.language_model import LanguageModel, eval_mode
from whet.objectives.objective import Objective
from whet.objectives.preference import Preference, response_logprobs
from whet.recipes.frozen_models import check_reference_length
from whet.recipes.recipe import INITIAL_MODEL, Build, ColumnShape, FrozenModel, Recipe, StepShape
from whet.training.loss import autocast_context

log = logging.getLogger("whet")


class PreferenceRecipe(Recipe[PreferenceObjective]):
    """Trains a language model on pairs of chosen and rejected completions."""

    def needs(self) -> Needs:
        """Request pairs of a chosen and a rejected completion."""
        return Needs(pairs=True, weights=False)

    def frozen_models(self) -> Mapping[str, FrozenModel]:
        """Return the reference model, or nothing if the loss does not need one."""
        section = self.section
        if not section.has_reference:
            return {}
        reference = FrozenModel(
            section.reference_model or INITIAL_MODEL,
            "objective.reference_model",
            trained_dtype=True,
            before_training=not self._is_online,
        )
        return {"reference": reference}

    @property
    def _is_online(self) -> bool:
        return self.section.has_reference and self.section.reference == "online"

    def step_shape(self) -> StepShape:
        """Return the shape of a step: two documents per pair."""
        return StepShape(documents=2, multiple=2, columns={"values": ColumnShape("document", (1,))})

    def prepare(self, b: Build) -> None:
        """Compute the reference log-probabilities of every pair, unless the reference model is online."""
        if not self.section.has_reference:
            return
        spec, reference = self.frozen_models()["reference"], b.frozen.get("reference")
        examples: Mapping[str, StoredPairs] = b.data.examples
        if isinstance(reference, LanguageModel) and spec.name != INITIAL_MODEL:
            longest = max(int(pairs.sides.lengths.max()) for pairs in examples.values())
            check_reference_length(spec, reference, longest)
        if self._is_online:
            return
        model, identity = b.model, f"{b.base_digest} {b.model.fingerprint}"
        if isinstance(reference, LanguageModel):
            model, identity = reference, b.identities[spec.name]
        for name, pairs in examples.items():
            pairs.reference_logprobs = _reference_logprobs(name, pairs, model, identity, b)

    def objective(self, b: Build) -> Objective:
        """Return the preference objective."""
        section = self.section
        return Preference(
            section.kind,
            beta=section.resolved_beta,
            gamma=section.gamma,
            label_smoothing=section.label_smoothing,
            logprobs=section.logprobs,
            reference=b.frozen["reference"] if self._is_online else None,
        )


def _reference_logprobs(
    name: str, pairs: StoredPairs, model: LanguageModel, identity: str, b: Build
) -> np.ndarray:
    """Return the reference log-probabilities [pairs, 2] of the completions, computed once and then stored."""
    sides, store = pairs.sides, pairs.store
    assert isinstance(store, TokenStore)  # pairs are not streamed
    key = hashlib.sha256(f"{identity} {b.precision.compute}".encode())
    key.update(np.stack((sides.starts, sides.stops)).tobytes())
    path = store.directory / f"reference-{key.hexdigest()[:32]}.bin"
    if b.world.broadcast(path.is_file() and path.stat().st_size == 8 * len(sides)):
        log.info("reference: using stored log-probabilities of %s", name)
        return np.fromfile(path, dtype=np.float64).reshape(-1, 2)
    log.info("reference: computing log-probabilities of %d completions of %s", len(sides), name)
    logprobs = np.zeros((len(pairs), 2))
    device = model.device
    batches = list(iter_batches_once(pairs, b.data.steps))
    local_scores = []  # of this rank's batches
    with eval_mode(model):
        for _, (_, batch), _ in b.world.local_items(batches):
            with autocast_context(b.precision, device):
                scores = response_logprobs(model, batch.to(device))
            local_scores.append(scores.double().cpu().numpy().reshape(-1, 2))
    all_scores = b.world.gather_in_order(local_scores, len(batches))
    for (indices, _), batch_scores in zip(batches, all_scores, strict=True):
        logprobs[indices] = batch_scores
    if b.world.is_main:
        store.write_sidecar(path.name, logprobs)
    return logprobs
