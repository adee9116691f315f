"""The result of a run as Python programs and notebooks have it."""

import html
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from runner.core import ConfigError, checkpoint_file, run_result, terminal
from runner.tracking import history
from runner.tracking.result_table import page_lines, result_rows, table_rows

if TYPE_CHECKING:
    import pandas
    import torch


class RunResult(run_result.RunResult):
    """The numbers of a run and how it ended, with what the run recorded and the trained weights.

    The class that it derives from lists the attributes.
    """

    @classmethod
    def of(cls, result: run_result.RunResult) -> "RunResult":
        """Return a result with the methods of this class."""
        return cls(**{part.name: getattr(result, part.name) for part in fields(result)})

    def history(self) -> "pandas.DataFrame":
        """Return what the run recorded: a row for each step, a column for each metric.

        It is read from the run's folder, or, where the folder is not here, from MLflow. See
        runner.tracking.history.to_frame for the columns.

        Raises:
            ConfigError: neither the folder nor the MLflow run is here.
            TrackingError: the store does not answer.
        """
        if Path(self.folder).is_dir():
            return history.to_frame(history.from_folder(Path(self.folder)))
        if self.run_id is None or self.tracking_uri is None:
            problem = f"{self.folder} is no folder here, and the run in no store that is named here"
            raise ConfigError(f"{problem}. Type runner.load(<its MLflow id>, uri=<its store>).")
        from runner.tracking.reader import Reader  # imports mlflow

        return history.to_frame(Reader(self.tracking_uri).history(self.run_id))

    def table(self) -> "pandas.DataFrame":
        """Return the result as a table of one row; docs/sweeps.md describes the columns."""
        import pandas

        return pandas.DataFrame(table_rows([self]))

    def state_dict(self) -> "dict[str, torch.Tensor]":
        """Return the trained weights of the run's newest checkpoint, on the CPU, by name.

        load_state_dict of a model like the one that was trained takes them. With train.ema they are
        the averaged ones.

        Raises:
            ConfigError: the run left no checkpoint (checkpoint.final=false), it is damaged, or its
                weights are packed or those of an adapter.
        """
        checkpoints = checkpoint_file.checkpoints_of_run(Path(self.folder))
        if not checkpoints:
            raise ConfigError(f"{self.folder} holds no checkpoint. Type checkpoint.final=true.")
        content = checkpoint_file.load(checkpoints[-1])
        adapter = content["spec"].get("adapter") or {}
        if content.get("layout") or adapter.get("_target_"):
            kind = "those of an adapter" if adapter.get("_target_") else "packed"
            raise ConfigError(
                f"The weights in {self.folder} are {kind}. Type mode=evaluate checkpoint=<folder>."
            )
        # With train.ema the averaged weights are those that the metrics are of.
        average = content.get("average") or {}
        return {**content["model"], **average.get("weights", {})}

    def _repr_html_(self) -> str:
        """Return the result as a notebook shows it."""
        title = terminal.sanitize(f"{self.label}: {self.outcome}")
        rows = []
        for name, text in [*result_rows(self), *page_lines(self)]:
            cells = (html.escape(terminal.sanitize(part)) for part in (name, text))
            rows.append("<tr><th>{}</th><td>{}</td></tr>".format(*cells))
        return f"<table><caption>{html.escape(title)}</caption>{''.join(rows)}</table>"
