"""Import bitsandbytes without its messages: on optional packages, and on casts in every forward.

The other modules take the library from here, so that it is imported and silenced once.
"""

import logging

from runner.utils.import_warnings import suppress_import_warnings

with suppress_import_warnings():
    import bitsandbytes as bnb
    from bitsandbytes.cextension import lib
    from bitsandbytes.functional import QuantState, dequantize_4bit
    from bitsandbytes.utils import unpack_tensor_to_dict

# It warns of the cast to float16 before int8 in every forward.
logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)

__all__ = ["QuantState", "bnb", "dequantize_4bit", "lib", "unpack_tensor_to_dict"]
