"""How frameworks make batches of examples of unequal length: pure functions of lengths, and of an order where one is
given, to bins. Each family is a file named after its framework; `registry.py` names them all."""
