"""`python -m batchsim` is the command `batchsim`."""

from batchsim.cli import app

if __name__ == "__main__":
    app(prog_name="batchsim")
