"""Published claims about low precision, measured again on this machine.

A claim is what a paper says and a function that measures it: claim.py has the types, catalogue.py
the claims. The functions are in rounding.py (numbers and sums), packed_weights.py (4 bits),
products.py (int8 and FP8) and networks.py.
"""
