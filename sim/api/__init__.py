"""What the command line does, as functions: `run`, `capacity`, `plan`, and results that draw and explain themselves."""
