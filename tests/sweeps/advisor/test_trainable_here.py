"""Which precisions mode=advise tries when the command names none."""

import pytest
from states import CPU

from runner.precision.registry import supported_precisions
from runner.sweeps.advisor.advise_command import trainable_here

PACKED = {"int4", "int8", "nvfp4"}


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_packed_precisions_are_tried_with_an_adapter_and_training_for_them_never(compose, adapter):
    spec = compose(f"adapter={adapter}")
    tried = {*trainable_here(spec, (), supported_precisions(CPU), None)}
    assert {"32-true", "bf16-mixed"} <= tried
    assert tried & PACKED == (PACKED if adapter == "lora" else set())
    assert not any(name.startswith("qat-") for name in tried)
