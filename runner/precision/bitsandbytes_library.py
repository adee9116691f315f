"""bitsandbytes, without its advice in every forward and on a package that it can do without."""

import logging

from runner.quiet import quiet

with quiet():
    import bitsandbytes as bnb
    from bitsandbytes.functional import QuantState, dequantize_4bit, int8_vectorwise_quant
    from bitsandbytes.utils import unpack_tensor_to_dict

# It tells of the cast to float16 before int8 in every forward.
logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)

__all__ = [
    "QuantState",
    "bnb",
    "dequantize_4bit",
    "int8_vectorwise_quant",
    "unpack_tensor_to_dict",
]
