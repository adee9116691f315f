"""Store in checkpoints which batch of a stream was trained on last, and compare it on a resume."""

from collections.abc import Callable, Mapping
from typing import Any

from runner.data.stream_loader import BatchLoader, StreamLoader, StreamPlace
from runner.training.callbacks.callback import Callback
from runner.training.state import TrainState


class StreamPosition(Callback):
    """Keeps a hash of the last batch of a stream, so that a resume notices another stream.

    Args:
        state: of the training.
        loader: of the stream.
        report: called once, while the resumed run reads its first batch, if the stream yields
            another batch there than it did.
    """

    key = "stream"

    def __init__(self, state: TrainState, loader: StreamLoader, report: Callable[[], None]) -> None:
        self.state = state
        self.loader = loader
        self.report = report

    def state_dict(self) -> dict[str, Any]:
        """Return the hash of the last batch, 16 hex digits."""
        return {"digest": self.loader.last_digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the loader compare the batch before the one at which the run continues."""
        place = StreamPlace(max(1, self.state.epoch), self.state.position)
        digest = state.get("digest") or ""
        self.loader.resume_at(self.state.step, place, digest, self.report)


def stream_callbacks(
    state: TrainState, loader: BatchLoader, report: Callable[[], None]
) -> list[Callback]:
    """Return the callback for a stream's loader, none for another; see StreamPosition."""
    if isinstance(loader, StreamLoader):
        return [StreamPosition(state, loader, report)]
    return []
