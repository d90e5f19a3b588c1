"""Decoding in fixed shapes: one step that a CUDA graph can record and replay without the host."""

import logging
from collections.abc import Callable

import torch

from whet.generation.decode_batch import DecodeBatch, slots_for
from whet.generation.sampling import Picker
from whet.models.kv_cache import KeyValueCache
from whet.models.language_model import LanguageModel
from whet.ops.attention import Layout

log = logging.getLogger("whet")

_LOOK = 4  # steps between two looks of the host at what was picked


def graphs_problem(model: LanguageModel, cache: object) -> str | None:
    """Why decoding steps cannot be recorded as a CUDA graph; None where they can."""
    if not model.paths.decoding:
        return "this model runs as plain torch"
    device = next(model.parameters()).device
    if device.type != "cuda":
        return f"there are no CUDA graphs on {device.type}"
    if not isinstance(cache, KeyValueCache):
        return "transformers keeps the cache of this model"
    if hasattr(model, "unshard"):
        return "ranks hold the weights in parts, and a graph would remember where they were gathered"
    return None


class StaticDecodeBatch:
    """Rows that have read their prompts, decoded in steps of fixed shapes.

    Every tensor a step reads or writes stays where it is. Rows that ended go on, unread, until half of them
    can be dropped at once: another number of rows is another graph.
    """

    def __init__(self, rows: DecodeBatch, picker: Picker, *, max_tokens: int, graph: bool = True) -> None:
        self.model, self.cache, self.picker = rows.model, rows.cache, picker
        self.max_tokens = max_tokens
        self.graph = graph
        self._replay: Callable[[], None] | None = None
        self._warm = False
        self._live = list(range(len(rows.visible)))  # which of the computed rows are still asked for
        self._filled = rows.visible.shape[1]
        self._done = self._read = 0
        device = rows.visible.device
        self._place = torch.tensor([self._filled], device=device)
        self._visible, self._slots = rows.visible, rows.slots
        self._make_room()
        self._position = rows.next_position
        self._token, logprobs = picker(rows.logits())
        self._tokens = self._token.new_zeros(len(self._token), max_tokens)
        self._logprobs = logprobs.new_zeros(len(self._token), max_tokens)
        self._tokens[:, 0], self._logprobs[:, 0] = self._token, logprobs
        self._done = 1

    def _make_room(self) -> None:
        slots = slots_for(self._filled, self.max_tokens - self._done)
        self.cache.fix(self._place, slots)
        more = (0, slots - self._visible.shape[1])
        self._visible = torch.nn.functional.pad(self._visible, more)
        self._slots = torch.nn.functional.pad(self._slots, more)
        self._forget_graph()

    def _forget_graph(self) -> None:
        self._replay, self._warm = None, False

    def step(self) -> None:
        """Feed every row its last token and pick the next one; all on the device, all in place."""
        self._visible.index_fill_(1, self._place, True)
        self._slots.index_copy_(1, self._place, self._position[:, None])
        # a row past the end of its context is no longer read; its position must still exist
        position = self._position.clamp(max=self.model.max_positions - 1)[:, None]
        layout = Layout(
            visible=self._visible,
            slots=self._slots,
            mask=self._visible[:, None, None, :],
            causal=False,
            queries=position,
        )
        hidden = self.model.hidden(self._token[:, None], position, layout, self.cache)[:, -1]
        count = self.picker.count.clone()
        token, logprobs = self.picker(self.model.logits(hidden))
        self._token.copy_(token)
        self._tokens.index_copy_(1, count, token[:, None])
        self._logprobs.index_copy_(1, count, logprobs[:, None])
        self._position += 1
        self._place += 1

    def decode(self) -> list[tuple[list[int], list[float]]]:
        """Some more steps: the tokens and log-probabilities of the rows still asked for, step by step."""
        steps = min(_LOOK - (self._read == 0), self.max_tokens - self._done)
        for _ in range(steps):
            if self._filled == self._visible.shape[1]:
                self._make_room()
            self._run()
            self._filled += 1
            self._done += 1
        span = slice(self._read, self._done)
        self._read = self._done
        tokens, logprobs = self._tokens[:, span].T.tolist(), self._logprobs[:, span].T.tolist()
        return [
            ([step[row] for row in self._live], [numbers[row] for row in self._live])
            for step, numbers in zip(tokens, logprobs, strict=True)
        ]

    def _run(self) -> None:
        """One step: the first of its shape as it is, then recorded, then replayed."""
        if not self.graph:
            self.step()
            return
        if not self._warm:
            self._warm = True
            _on_side_stream(self.step)  # libraries set themselves up in their first call
            return
        if self._replay is None:
            self._replay = self._recorded()
        self._replay()

    def _recorded(self) -> Callable[[], None]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.step()
        except RuntimeError as error:
            self.graph = False
            torch.cuda.set_stream(stream)  # a recording that failed leaves its own behind
            torch.cuda.synchronize()
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())  # or it would wait for the recording's end
            log.info("generation: without CUDA graphs (%s)", str(error).splitlines()[0])
            return self.step
        return graph.replay

    def keep(self, places: list[int]) -> None:
        """Go on with these of the rows."""
        self._live = [self._live[place] for place in places]
        if not self._live or 2 * len(self._live) > len(self._token):
            return
        kept = torch.tensor(self._live, device=self._token.device)
        self._live = list(range(len(self._live)))
        self.cache.keep(kept)
        self.picker.keep(kept)
        self._visible, self._slots = self._visible[kept], self._slots[kept]
        self._position, self._token = self._position[kept], self._token[kept]
        self._tokens, self._logprobs = self._tokens[kept], self._logprobs[kept]
        self._forget_graph()


def _on_side_stream(step: Callable[[], None]) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
