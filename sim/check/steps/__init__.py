"""Steps that real engines recorded of themselves, read from their logs."""
