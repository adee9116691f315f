"""What a store's answers mean: a refusal, or that it cannot answer now. Imports mlflow."""

from collections.abc import Iterator
from contextlib import contextmanager

from mlflow.exceptions import MlflowException

from runner.utils.secrets import redact

# Saying it again would get the same answer. All else is retried: a server that is away answers
# INTERNAL_ERROR here, a locked database TEMPORARILY_UNAVAILABLE.
REFUSALS = {
    "INVALID_PARAMETER_VALUE",
    "RESOURCE_DOES_NOT_EXIST",
    "RESOURCE_ALREADY_EXISTS",
    "NOT_FOUND",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "CUSTOMER_UNAUTHORIZED",
    "ENDPOINT_NOT_FOUND",
    "FEATURE_DISABLED",
    "NOT_IMPLEMENTED",
}
# What databases say that no waiting mends, whatever kind of error says it.
HOPELESS = (
    "file is not a database",
    "readonly database",
    "password authentication failed",
    "out-of-date database schema",
)


class RefusedError(Exception):
    """The store will not take this, however often it is asked."""


class UnreachableError(Exception):
    """The store cannot answer now. `doubtful` if the answer may also be a refusal: a server whose
    connection pool is used up answers BAD_REQUEST."""

    def __init__(self, message: str, doubtful: bool = False) -> None:
        super().__init__(message)
        self.doubtful = doubtful


@contextmanager
def classify_errors() -> Iterator[None]:
    """Turns whatever a client call raises into RefusedError or UnreachableError."""
    try:
        yield
    except (RefusedError, UnreachableError):
        raise
    except MlflowException as error:
        if error.error_code in REFUSALS or _hopeless(error):
            raise RefusedError(redact(str(error))) from error
        raise UnreachableError(redact(str(error)), error.error_code == "BAD_REQUEST") from error
    except ImportError as error:
        raise RefusedError(
            f"a package is missing for it: {error}. Install it, or name the driver that you have "
            "in the URI, for example postgresql+psycopg2://"
        ) from error
    except Exception as error:
        text = redact(f"{type(error).__name__}: {error}")
        if _hopeless(error):
            raise RefusedError(text) from error
        raise UnreachableError(text, doubtful=True) from error


def _hopeless(error: Exception) -> bool:
    return any(said in str(error) for said in HOPELESS)
