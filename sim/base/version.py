"""The version of batchsim, which a clone that is not installed has too."""

VERSION = "0.1.0"
