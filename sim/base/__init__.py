"""What stands under everything: errors, units and ranges of numbers, plain data, users' files."""
