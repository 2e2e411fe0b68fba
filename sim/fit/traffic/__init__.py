"""Random traffic fitted to a recorded one: when requests arrive, how long they are, which of them follow each other."""
