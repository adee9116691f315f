"""Sort a store's errors into refusals, which end an upload, and outages, which are retried.

It imports mlflow, so only the writer process may import it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from mlflow.exceptions import MlflowException

from runner.utils.secrets import redact

# Error codes of MLflow whose cause no retry changes. All others are retried: a server that cannot
# be reached gives INTERNAL_ERROR here, a locked database TEMPORARILY_UNAVAILABLE.
REFUSAL_CODES = {
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
# Messages of databases whose cause no retry changes, whatever the type of the error.
PERMANENT_MESSAGES = (
    "file is not a database",
    "readonly database",
    "password authentication failed",
    "out-of-date database schema",
)


class RefusedError(Exception):
    """The store refuses a call; a retry would get the same answer."""


class UnreachableError(Exception):
    """The store cannot answer now.

    Args:
        message: for the log and the user.
        doubtful: the answer may also be a refusal. A server whose connection pool is used up
            answers BAD_REQUEST.
    """

    def __init__(self, message: str, doubtful: bool = False) -> None:
        super().__init__(message)
        self.doubtful = doubtful


@contextmanager
def classify_errors() -> Iterator[None]:
    """Turn any exception of a client call into RefusedError or UnreachableError."""
    try:
        yield
    except (RefusedError, UnreachableError):
        raise
    except MlflowException as error:
        if error.error_code in REFUSAL_CODES or _is_permanent(error):
            raise RefusedError(redact(str(error))) from error
        is_doubtful = error.error_code == "BAD_REQUEST"
        raise UnreachableError(redact(str(error)), is_doubtful) from error
    except ImportError as error:
        raise RefusedError(
            f"a package is missing for it: {error}. Install it, or name the driver that you have "
            "in the URI, for example postgresql+psycopg2://"
        ) from error
    except Exception as error:
        # Connection errors of many libraries, and bugs: doubtful, so that a batch that always
        # fails is skipped in the end.
        text = redact(f"{type(error).__name__}: {error}")
        if _is_permanent(error):
            raise RefusedError(text) from error
        raise UnreachableError(text, doubtful=True) from error


def _is_permanent(error: Exception) -> bool:
    return any(text in str(error) for text in PERMANENT_MESSAGES)
