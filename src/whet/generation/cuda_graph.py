"""Decoding steps of fixed shapes, which a CUDA graph can capture and replay."""

import logging
from collections.abc import Callable

import torch

from whet.generation.decode_batch import DecodeBatch, cache_slots
from whet.generation.sampling import TokenSampler
from whet.models.kv_cache import KeyValueCache
from whet.models.language_model import LanguageModel
from whet.ops.attention import Layout

log = logging.getLogger("whet")

_STEPS_PER_SYNC = 4  # steps between two device-to-host copies of the sampled tokens


def graph_unsupported_reason(model: LanguageModel, cache: object) -> str | None:
    """Return why decoding steps cannot be captured as a CUDA graph, or None if they can."""
    if not model.paths.decoding:
        return "this model uses the plain torch path"
    device = next(model.parameters()).device
    if device.type != "cuda":
        return f"CUDA graphs are not available on {device.type}"
    if not isinstance(cache, KeyValueCache):
        return "the cache of this model belongs to transformers"
    if hasattr(model, "unshard"):
        return "the weights are sharded, and a graph would store the addresses of the gathered weights"
    return None


class StaticDecodeBatch:
    """A prefilled batch, decoded in steps of fixed shapes.

    Every tensor that a step reads or writes keeps its address. Finished rows are still computed, and their
    tokens ignored, until half of the rows can be dropped at once: a new batch size needs a new graph.
    """

    def __init__(
        self, rows: DecodeBatch, sampler: TokenSampler, *, max_tokens: int, graph: bool = True
    ) -> None:
        self.model, self.cache, self.sampler = rows.model, rows.cache, sampler
        self.max_tokens = max_tokens
        self.graph = graph
        self._replay: Callable[[], None] | None = None
        self._is_warm = False
        self._live = list(range(len(rows.visible)))  # indices of the computed rows that are not finished
        self._filled = rows.visible.shape[1]  # slots of the cache
        self._steps_done = self._steps_read = 0
        device = rows.visible.device
        self._slot = torch.tensor([self._filled], device=device)  # of the next token
        self._visible, self._slots = rows.visible, rows.slots
        self._grow_cache()
        self._position = rows.next_position
        self._token, logprobs = sampler(rows.logits())
        self._tokens = self._token.new_zeros(len(self._token), max_tokens)
        self._logprobs = logprobs.new_zeros(len(self._token), max_tokens)
        self._tokens[:, 0], self._logprobs[:, 0] = self._token, logprobs
        self._steps_done = 1

    def _grow_cache(self) -> None:
        slots = cache_slots(self._filled, self.max_tokens - self._steps_done)
        self.cache.make_static(self._slot, slots)
        padding = (0, slots - self._visible.shape[1])
        self._visible = torch.nn.functional.pad(self._visible, padding)
        self._slots = torch.nn.functional.pad(self._slots, padding)
        self._discard_graph()

    def _discard_graph(self) -> None:
        self._replay, self._is_warm = None, False

    def step(self) -> None:
        """Feed every row its last token and sample the next one, in place and without a host sync."""
        self._visible.index_fill_(1, self._slot, True)
        self._slots.index_copy_(1, self._slot, self._position[:, None])
        # the tokens of a row past the end of its context are ignored, but its position must be valid
        position = self._position.clamp(max=self.model.max_positions - 1)[:, None]
        layout = Layout(
            visible=self._visible,
            slots=self._slots,
            mask=self._visible[:, None, None, :],
            causal=False,
            queries=position,
        )
        hidden = self.model.hidden(self._token[:, None], position, layout, self.cache)[:, -1]
        count = self.sampler.count.clone()
        token, logprobs = self.sampler(self.model.logits(hidden))
        self._token.copy_(token)
        self._tokens.index_copy_(1, count, token[:, None])
        self._logprobs.index_copy_(1, count, logprobs[:, None])
        self._position += 1
        self._slot += 1

    def decode(self) -> list[tuple[list[int], list[float]]]:
        """Run a few steps; return the tokens and log-probabilities of the unfinished rows, per step."""
        steps = min(_STEPS_PER_SYNC - (self._steps_read == 0), self.max_tokens - self._steps_done)
        for _ in range(steps):
            if self._filled == self._visible.shape[1]:
                self._grow_cache()
            self._run_step()
            self._filled += 1
            self._steps_done += 1
        span = slice(self._steps_read, self._steps_done)
        self._steps_read = self._steps_done
        tokens, logprobs = self._tokens[:, span].T.tolist(), self._logprobs[:, span].T.tolist()
        return [
            ([step_tokens[row] for row in self._live], [step_logprobs[row] for row in self._live])
            for step_tokens, step_logprobs in zip(tokens, logprobs, strict=True)
        ]

    def _run_step(self) -> None:
        """Run one step: the first of its shape eagerly, the second captured, the others replayed."""
        if not self.graph:
            self.step()
            return
        if not self._is_warm:
            self._is_warm = True
            _run_on_side_stream(self.step)  # libraries initialize themselves in their first call
            return
        if self._replay is None:
            self._replay = self._capture()
        self._replay()

    def _capture(self) -> Callable[[], None]:
        """Return the replay of a captured step, or the step itself if it cannot be captured."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.step()
        except RuntimeError as error:
            self.graph = False
            torch.cuda.set_stream(stream)  # a failed capture leaves its own stream current
            torch.cuda.synchronize()
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())  # it still expects the end of the capture
            log.info("generation: without CUDA graphs (%s)", str(error).splitlines()[0])
            return self.step
        return graph.replay

    def keep(self, indices: list[int]) -> None:
        """Continue with the given rows only."""
        self._live = [self._live[i] for i in indices]
        if not self._live or 2 * len(self._live) > len(self._token):
            return
        rows = torch.tensor(self._live, device=self._token.device)
        self._live = list(range(len(self._live)))
        self.cache.select_rows(rows)
        self.sampler.keep(rows)
        self._visible, self._slots = self._visible[rows], self._slots[rows]
        self._position, self._token = self._position[rows], self._token[rows]
        self._tokens, self._logprobs = self._tokens[rows], self._logprobs[rows]
        self._discard_graph()


def _run_on_side_stream(step: Callable[[], None]) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
