"""Define the parts of the run spec that say where weights come from and where they go."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class InitSpec:
    """Where the parameters of a model come from.

    Attributes:
        low_memory: make the parameters on the device in the precision's dtype, which changes the
            seeded weights; false makes them in float32 on the CPU and casts them. Under a precision
            that packs weights, true leaves the seeded weights as they are and keeps them in files
            until they are packed.
        weights: weights that the model starts from: a checkpoint, run folder or MLflow run id of
            this runner, a .safetensors file, a state dict of torch.save (.pt, .pth, .bin) or a
            folder of save_pretrained; null starts from seeded weights.
        skip: patterns of dotted names of parameters or modules, as in [head], that keep their fresh
            values, and of names in the file that are not used.
        rename: prefixes of names in the file and what stands in their place in the model, as in
            {backbone:encoder}; null removes a prefix, as in {module:null}; * puts one in front of
            every name, as in {*:model}; several apply one after the other.
    """

    low_memory: bool = False
    weights: str | None = None
    skip: list[Any] = field(default_factory=list)
    rename: dict[Any, Any] = field(default_factory=dict)

    def problems(self) -> Iterator[str]:
        """Yield a message for each key that has no weights to apply to, or a wrong value."""
        for key in ("skip", "rename"):
            if getattr(self, key) and self.weights is None:
                yield f"init.{key} applies to init.weights, which is not given. Leave it out."
        if not all(isinstance(pattern, str | int) and pattern != "" for pattern in self.skip):
            yield f"init.skip={self.skip} does not fit. Allowed: names, as in [head,*.norm]."
        for old, new in self.rename.items():
            if not isinstance(old, str | int) or not isinstance(new, str | int | None):
                yield (
                    f"init.rename={self.rename} does not fit. Allowed: prefixes of names, as in "
                    "{backbone:encoder} or {module:null}."
                )


@dataclass(frozen=True)
class CheckpointSpec:
    """Checkpoints that a run loads and those that it saves.

    Attributes:
        path: checkpoint that mode=evaluate loads: a file, a run folder or an MLflow run id;
            `checkpoint=` is short for it.
        resume: run to resume: `last` (the newest interrupted run), a file, a run folder or an
            MLflow run id; `auto` resumes from this run's own folder if it has a checkpoint, else
            starts from the beginning; null starts a new run.
        every_steps: optimizer steps between checkpoints; null saves only at the end.
        keep: number of newest checkpoints to keep; older ones are deleted.
        best: also keep the checkpoint of the best evaluation, as `best.pt`.
        final: save a checkpoint when the run ends or is stopped.
        safetensors: write the weights as `model.safetensors` when the run ends.
        adapter: write a LoRA adapter as a folder of peft, `adapter/`, when a run with adapter=lora
            ends.
        pretrained: write a model of transformers as a folder that from_pretrained loads,
            `pretrained/`, when the run ends, with packed weights unpacked and an adapter merged.
    """

    path: str | None = None
    resume: str | None = None
    every_steps: int | None = None
    keep: int = 1
    best: bool = False
    final: bool = True
    safetensors: bool = False
    adapter: bool = True
    pretrained: bool = False
