"""Tables and sentences for a terminal, and the same findings as JSON values."""
