"""The stores that one writer process has met. Imports mlflow."""

from runner.tracking.writer.store import Store


class StoreCache:
    """The stores of this process by URI, and the sweeps' parent runs and names that it has met."""

    def __init__(self) -> None:
        self._stores: dict[str, Store] = {}
        self.parents: dict[tuple[str, str], str] = {}
        self.names: dict[str, str] = {}

    def get(self, uri: str) -> Store:
        if uri not in self._stores:
            self._stores[uri] = Store(uri)
        return self._stores[uri]
