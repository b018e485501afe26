"""From arrays of tokens to text: the reader of an engine's steps, in the engine's process or behind a socket.

It turns tokens into text as they arrive, finds stop strings, and drops everything after them. The engine does not know the
text: the caller must tell it which streams were ended by a stop string.
"""

from collections.abc import Callable, Sequence

from tilewright.engine.deltas import Note, StepDeltas
from tilewright.engine.request import Delta, SamplingParams
from tilewright.engine.stops import OutputText
from tilewright.engine.tokenizer import Detokenizer, Tokenizer

__all__ = ["Reader"]

NOTHING = Note(0)


class _Sample:
    """The state of one stream."""

    __slots__ = ("cached_tokens", "direct", "held", "index", "plain", "plain_one", "request_id", "text")

    def __init__(self, request_id: str, index: int, text: OutputText | None, *, whole: bool):
        self.request_id = request_id
        self.index = index
        self.text = text
        self.cached_tokens = 0
        self.direct: Callable[[str, int], bool] | None = None
        self.plain = None if text is None else text.plain
        """Converts tokens to text directly, if there are no stop strings."""
        self.plain_one = None if text is None else text.plain_one
        self.held: list[int] | None = [] if whole and (text is None or text.plain) else None
        """Tokens that no delta contains yet, if the caller does not need each token at once; otherwise None."""


class Reader:
    """Converts the results of steps to deltas. `stopped`: streams ended by a stop string; the caller clears this list.

    Args:
        tokenizer: makes the text; None: deltas contain ids and no text.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._samples: dict[int, _Sample] = {}
        self.stopped: list[int] = []

    def __len__(self) -> int:
        return len(self._samples)

    def open(
        self,
        streams: Sequence[int],
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        whole: bool = False,
    ) -> None:
        """Start reading these streams: the samples of one prompt, by index. whole: one delta may collect many tokens."""
        for index, stream in enumerate(streams):
            text = None
            if self._tokenizer is not None:
                detokenizer = Detokenizer(self._tokenizer, prompt_ids, special=params.special_tokens)
                text = OutputText(detokenizer, params.stop, params.min_tokens)
            self._samples[stream] = _Sample(request_id, index, text, whole=whole)

    def direct(self, stream: int, take: Callable[[str, int], bool]) -> None:
        """For rows without a note, first call `take(text, number of tokens)`; if it returns True, no delta is made."""
        sample = self._samples.get(stream)
        if sample is not None and sample.plain is not None:
            sample.direct = take

    def close(self, streams: Sequence[int]) -> None:
        """Stop reading these streams."""
        for stream in streams:
            self._samples.pop(stream, None)

    def clear(self) -> None:
        """Stop reading all streams."""
        self._samples.clear()
        self.stopped.clear()

    def read(self, step: StepDeltas) -> list[Delta]:
        """The deltas of a step for the open streams, in the order of its rows. A stream that ends is closed."""
        if len(step.tokens) == len(step) and (step.counts == 1).all():
            return self._read_ones(step)
        deltas: list[Delta] = []
        samples, tokens = self._samples, tuple(step.tokens.tolist())
        notes = {note.row: note for note in step.notes}
        end = 0
        for row, (stream, count) in enumerate(zip(step.streams.tolist(), step.counts.tolist(), strict=True)):
            start, end = end, end + count
            sample = samples.get(stream)
            if sample is None:
                continue
            if sample.held is not None and row not in notes:
                sample.held += tokens[start:end]
                continue
            if row in notes or sample.plain is None:
                deltas.append(self._delta(stream, sample, tokens[start:end], notes.get(row, NOTHING)))
                continue
            text = sample.plain(tokens[start:end])
            if sample.direct is None or not sample.direct(text, count):
                deltas.append(
                    Delta(sample.request_id, sample.index, tokens[start:end], text, cached_tokens=sample.cached_tokens)
                )
        return deltas

    def _read_ones(self, step: StepDeltas) -> list[Delta]:
        """`read` for a step in which each row has one token, which is the usual case."""
        deltas: list[Delta] = []
        samples, streams, notes = self._samples, step.streams.tolist(), {note.row: note for note in step.notes}
        for row, (sample, token) in enumerate(zip(map(samples.get, streams), step.tokens.tolist())):
            if sample is None:
                continue
            if row in notes or sample.plain_one is None:
                if sample.held is not None and row not in notes:
                    sample.held.append(token)
                else:
                    deltas.append(self._delta(streams[row], sample, (token,), notes.get(row, NOTHING)))
            elif sample.held is not None:
                sample.held.append(token)
            else:
                text = sample.plain_one(token)
                if sample.direct is None or not sample.direct(text, 1):
                    deltas.append(Delta(sample.request_id, sample.index, (token,), text, cached_tokens=sample.cached_tokens))
        return deltas

    def _delta(self, stream: int, sample: _Sample, tokens: tuple[int, ...], note: Note) -> Delta:
        if note.cached_tokens is not None:
            sample.cached_tokens = note.cached_tokens
        reason: str | None = note.finish_reason
        stop_reason: str | int | None = note.stop_reason
        error, logprobs = note.error, note.logprobs
        if sample.held:
            tokens, sample.held = (*sample.held, *tokens), []
        text, stop = "", None
        if sample.text is not None:
            # The token that ended a text is not part of the text.
            shown = tokens[:-1] if reason == "stop" else tokens
            text, stop, used = (sample.plain(shown), None, 0) if sample.plain else _push(sample.text, shown)
            if stop is not None:
                # The text may have reached its last token as well; the stop string takes precedence.
                tokens, logprobs = tokens[:used], logprobs[:used]
                if reason is None:
                    self.stopped.append(stream)
                reason, stop_reason, error = "stop", stop, None
            elif reason in ("stop", "length"):
                text += sample.text.finish()
        if reason is not None:
            del self._samples[stream]
        return Delta(
            request_id=sample.request_id,
            index=sample.index,
            token_ids=tokens,
            text=text,
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
            prompt_logprobs=note.prompt_logprobs,
            error=error,
            retry_after_s=note.retry_after_s,
            cached_tokens=sample.cached_tokens,
        )


def _push(text: OutputText, tokens: Sequence[int]) -> tuple[str, str | None, int]:
    """(text that is safe to show, the stop string that ends it or None, tokens up to there)."""
    shown = ""
    for used, token in enumerate(tokens, start=1):
        piece, stop = text.push(token)
        shown += piece
        if stop is not None:
            return shown, stop, used
    return shown, None, len(tokens)
