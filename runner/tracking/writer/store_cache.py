"""The stores that one writer process has opened. Imports mlflow."""

from runner.tracking.writer.store import Store


class StoreCache:
    """The stores of this process by URI, and what it knows of sweeps in them.

    Attributes:
        parents: the id of a sweep's parent run, by the store's URI and the sweep's id.
        names: the name of a sweep, by its id.
    """

    def __init__(self) -> None:
        self._stores: dict[str, Store] = {}
        self.parents: dict[tuple[str, str], str] = {}
        self.names: dict[str, str] = {}

    def get(self, uri: str) -> Store:
        """Return the store at a URI; open it if this process has not yet."""
        if uri not in self._stores:
            self._stores[uri] = Store(uri)
        return self._stores[uri]
